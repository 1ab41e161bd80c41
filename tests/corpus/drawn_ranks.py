"""Drawn models, ranks that compute them in parts, and edits of both: numbers alone decide what is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
from node_models import info, model_of
from onnx import AttributeProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.shape_inference import infer_shapes

Arrays = list[list[np.ndarray]]
"""The numbers of a value: of each seed, on each member."""
Form = int | str
"""A dimension that members share out, ``whole``, or ``sum`` for terms."""
SEEDS = range(3)
SHAPES = [(4, 6), (6, 4), (4, 4), (4,), (6,), (4, 1), (1, 6), (2, 3, 4), ()]
ALIKE = [
    ["Relu", "Neg", "Exp", "Tanh", "Sigmoid", "Abs", "Sqrt", "Log", "Reciprocal", "Floor", "Softplus", "Sign", "Erf"],
    ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"],
    ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceSumSquare", "ReduceL1",
     "ReduceLogSumExp"],
    ["Softmax", "LogSoftmax"],
    ["Less", "Greater", "LessOrEqual", "GreaterOrEqual"],
    ["Gather", "GatherElements"], ["Tile", "Expand", "Reshape"], ["Squeeze", "Unsqueeze"], ["MaxPool", "AveragePool"],
]  # fmt: skip
UNARY, BINARY, REDUCTIONS, ROWS, COMPARISONS = ALIKE[:5]
REDUCES = [b"sum", b"mean", b"max", b"min"]


class Program:
    """Nodes on members of an axis, and the numbers of all values."""

    def __init__(self, members: int) -> None:
        self.members, self.nodes, self.arrays = members, list[NodeProto](), dict[str, Arrays]()
        self.inputs, self.stored = list[str](), list[str]()

    def value(self, arrays: Arrays, names: list[str]) -> str:
        name = f"{'x' if names is self.inputs else 'c'}{len(self.arrays)}"
        self.arrays[name] = arrays
        names.append(name)
        return name

    def constant(self, *arrays: Any, dtype: type = np.int64) -> str:
        """A stored value: one for all members, or one for each."""
        rows = [np.asarray(array, dtype) for array in arrays]
        return self.value([rows * (self.members // len(rows)) for _ in SEEDS], self.stored)

    def add(self, op_type: str, inputs: Sequence[str], results: int = 1, **attributes: Any) -> str | None:
        """The first result of a node; None where its operands or its numbers do not allow it."""
        names = [f"v{len(self.arrays) + at}" for at in range(results)]
        node = helper.make_node(op_type, inputs, names, **attributes)
        return node.output[0] if self.append(node) else None

    def append(self, node: NodeProto) -> bool:
        try:
            for member in range(self.members):
                self._check(node, member)
            with np.errstate(all="ignore"):
                rows = [self.results(node, [self.operand(name, seed) for name in node.input]) for seed in SEEDS]
        except Exception:  # an evaluator's exceptions have no common base
            return False
        every = [array for row in rows for results in row for array in results]
        if not all(array.size and np.isfinite(array).all() and np.abs(array).max() < 1e4 for array in every):
            return False
        self.nodes.append(node)
        for at, name in enumerate(node.output):
            self.arrays[name] = [[results[at] for results in row] for row in rows]
        return True

    def _check(self, node: NodeProto, member: int) -> None:
        """Raise for operands that onnx refuses; the evaluator takes more."""
        values = {name: self.arrays[name][0][member] for name in node.input if name}
        stored = {name: values[name] for name in self.stored if name in values}
        fed = {name: value for name, value in values.items() if name not in stored}
        versions = [helper.make_opsetid("", 20), helper.make_opsetid("gopt.comm", 1)]
        model = model_of([node], fed, node.output, opsets=versions, stored=stored)
        infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)

    def operand(self, name: str, seed: int) -> Sequence[np.ndarray | None]:
        return self.arrays[name][seed] if name else [None] * self.members

    def results(self, node: NodeProto, operands: Sequence[Sequence[np.ndarray | None]]) -> list[list[np.ndarray]]:
        """The results on each member."""
        if node.domain:
            return [[each] for each in called(node, operands[0])]  # type: ignore[arg-type]
        evaluator = ReferenceEvaluator(node)
        return [
            [*map(np.asarray, evaluator.run(None, dict(zip(node.input, (operand[member] for operand in operands)))))]
            for member in range(self.members)
        ]

    def model(self, member: int, outputs: Iterable[str]) -> ModelProto:
        def typed(name: str) -> ValueInfoProto:
            return info(name, self.arrays[name][0][member])

        stored = [numpy_helper.from_array(self.arrays[name][0][member], name) for name in self.stored]
        graph = helper.make_graph(self.nodes, "g", [*map(typed, self.inputs)], [*map(typed, outputs)], stored)
        versions = [helper.make_opsetid("", 20), helper.make_opsetid("gopt.comm", 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=8)


def reduced(how: bytes, arrays: Sequence[np.ndarray]) -> np.ndarray:
    stack = np.stack(arrays)
    return {b"sum": stack.sum, b"mean": stack.mean, b"max": stack.max, b"min": stack.min}[how](0)


def called(node: NodeProto, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    facts = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "AllGather":
        return [np.concatenate(arrays, facts["axis"])] * len(arrays)
    return [np.asarray(reduced(facts["reduce"], arrays))] * len(arrays)


def equal(one: np.ndarray, two: np.ndarray) -> bool:
    return one.shape == two.shape and np.allclose(one, two, rtol=1e-3, atol=1e-4, equal_nan=True)


def fits(parts: Sequence[np.ndarray], whole: np.ndarray, form: Form) -> bool:
    """Return whether members have a value in a form."""
    if form == "whole":
        return all(equal(part, whole) for part in parts)
    if form == "sum":
        return len({part.shape for part in parts}) == 1 and equal(reduced(b"sum", parts), whole)
    try:
        return equal(np.concatenate(parts, int(form)), whole)
    except ValueError:
        return False


def shows(parts: Sequence[np.ndarray], whole: np.ndarray, form: Form) -> bool:
    """Return whether members show a value in a form; a whole one may be flat, as a relation allows."""
    flat = form == "whole" and all(part.shape == (whole.size,) for part in parts)
    return fits(parts, whole.reshape(-1) if flat else whole, form)


def cuts(length: int, members: int) -> list[tuple[int, int]]:
    ends = [(length * index + members - 1) // members for index in range(members + 1)]
    return list(pairwise(ends))


def drawn_node(program: Program, draw: random.Random) -> str | None:
    """One more node, if its operands allow it."""
    floats = [name for name, rows in program.arrays.items() if rows[0][0].dtype == np.float32]
    flags = [name for name, rows in program.arrays.items() if rows[0][0].dtype == np.bool_]
    one, two = draw.choice(floats[-6:]), draw.choice(floats)
    shape = program.arrays[one][0][0].shape
    rank = len(shape)
    axis = draw.randrange(rank) if rank else 0

    def ints(*values: int) -> str:
        return program.constant(values)

    if rank and draw.random() < 0.5:
        return _moved(program, draw, one, shape, axis, ints)
    kind = draw.randrange(9)
    if kind == 0:
        return program.add(draw.choice(UNARY), [one])
    if kind <= 2 or not rank:
        number = program.constant(draw.choice([0.1, 2, -1, 3, 0.5, 0]), dtype=np.float32)
        return program.add(draw.choice(BINARY), [one, draw.choice([two, two, number])])
    if kind == 3:
        axes = sorted(draw.sample(range(rank), draw.randint(1, rank)))
        axes = [at - rank * draw.randint(0, 1) for at in axes]
        return program.add(draw.choice(REDUCTIONS), [one, ints(*axes)], keepdims=draw.randint(0, 1))
    if kind == 4:
        return program.add(draw.choice(ROWS), [one], axis=draw.choice([axis, axis - rank]))
    if kind == 5:
        way = draw.randrange(3)
        if way == 0:
            return program.add("Gemm", [one, two], transA=draw.randint(0, 1), transB=draw.randint(0, 1), alpha=0.5)
        if way == 1:
            return program.add("Einsum", [one, two], equation=draw.choice(EQUATIONS))
        return program.add("MatMul", [one, two])
    if kind == 6:
        scale = program.constant(
            np.linspace(0.5, 1.5, int(np.prod(shape[axis:]))).reshape(shape[axis:]), dtype=np.float32
        )
        return program.add("LayerNormalization", [one, scale], axis=draw.choice([axis, axis - rank]))
    if flags and draw.random() < 0.5:
        return program.add("Where", [draw.choice(flags), one, two])
    if draw.random() < 0.3:
        return program.add(
            "CumSum", [one, program.constant(axis)], exclusive=draw.randint(0, 1), reverse=draw.randint(0, 1)
        )
    return program.add(draw.choice(COMPARISONS), [one, two])


EQUATIONS = ("ij,jk->ik", "ij,kj->ik", "ij,ij->i", "ij,ij->j", "i,j->ij", "bij,bij->bi", "ij,kj->jik", "bij,ij->bj")


def _moved(
    program: Program, draw: random.Random, one: str, shape: tuple[int, ...], axis: int, ints: Callable[..., str]
) -> str | None:
    """A node that moves elements, or slides over them."""
    rank, length = len(shape), shape[axis]
    kind = draw.randrange(16)
    if kind == 0:
        return program.add("Transpose", [one], perm=draw.sample(range(rank), rank))
    if kind == 1:
        step = draw.choice([1, 1, 1, 2, -1, -2])
        start, stop = draw.randint(0, length - 1), draw.randint(1, length)
        if step < 0:
            start, stop = draw.randint(-1, length - 1), draw.choice([-length - 1, -length - 1, 0])
        return program.add("Slice", [one, ints(start), ints(stop), ints(axis), ints(step)])
    if kind == 2:
        like = [name for name, rows in program.arrays.items() if rows[0][0].dtype == np.float32]
        return program.add("Concat", [one, *draw.choices(like, k=draw.randint(1, 2))], axis=axis)
    if kind == 3:
        return program.add("Tile", [one, ints(*[draw.choice([1, 1, 2, 3]) for _ in range(rank)])])
    if kind == 4:
        front = draw.choice([(), (2,), (3,)])
        return program.add(
            "Expand", [one, ints(*front, *[draw.choice([n, 1]) if n > 1 else draw.choice([1, 2, 4]) for n in shape])]
        )
    if kind == 5:
        total = int(np.prod(shape))
        sizes = [(total,), (1, total), *((n, total // n) for n in (2, 3, 4, 6) if total % n == 0),
                 *((2, n, total // n // 2) for n in (2, 3) if total % (2 * n) == 0), (-1, shape[-1])]  # fmt: skip
        return program.add("Reshape", [one, ints(*draw.choice(sizes))])
    if kind == 6:
        pads = [draw.choice([0, 0, 1, 2]) for _ in range(2 * rank)]
        mode = draw.choice(["constant", "constant", "edge", "reflect"])
        return program.add("Pad", [one, ints(*pads)], mode=mode)
    if kind == 7:
        cut = draw.randint(1, length - 1) if length > 1 else 1
        return program.add("Split", [one, ints(cut, length - cut)], 2, axis=axis)
    if kind == 8:
        rows = [draw.randint(-length, length - 1) for _ in range(draw.randint(1, 6))]
        rows = draw.choice([rows, [*range(length)], [*range(length)][::-1], sorted(at % length for at in rows)])
        return program.add("Gather", [one, ints(*rows)], axis=axis)
    if kind == 9:
        return program.add("Trilu", [one, program.constant(draw.randint(-2, 2))], upper=draw.randint(0, 1))
    if kind == 10:
        return program.add(
            "ScatterElements",
            [one, _rows(program, draw, shape, axis), one],
            axis=axis,
            reduction=draw.choice(["none", "add", "max"]),
        )
    if kind == 11:
        return program.add("GatherElements", [one, _rows(program, draw, shape, axis)], axis=axis)
    if kind == 12:
        return program.add(
            *draw.choice(
                [("Unsqueeze", [one, ints(axis)]), ("Squeeze", [one]), ("Flatten", [one]), ("Identity", [one])]
            )
        )
    if kind == 13 and rank == 3:
        weight = program.constant(
            np.random.default_rng(draw.randrange(99)).standard_normal((2, shape[1], 2)), dtype=np.float32
        )
        if draw.random() < 0.5:
            return program.add(
                draw.choice(["MaxPool", "AveragePool"]),
                [one],
                kernel_shape=[2],
                strides=[draw.choice([1, 2])],
                pads=draw.choice([[0, 0], [1, 0]]),
            )
        return program.add(
            "Conv", [one, weight], pads=draw.choice([[0, 0], [1, 0], [1, 1]]), strides=[draw.choice([1, 2])]
        )
    if kind == 14:
        scales = [draw.choice([1.0, 1.0, 2.0, 3.0]) for _ in range(rank)]
        return program.add(
            "Resize",
            [one, "", program.constant(scales, dtype=np.float32)],
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )
    return program.add("TopK", [one, ints(draw.randint(1, length))], 2, axis=axis, largest=draw.randint(0, 1))


def _rows(program: Program, draw: random.Random, shape: tuple[int, ...], axis: int) -> str:
    """Numbers of places along an axis, each once."""
    perm = np.asarray(draw.sample(range(shape[axis]), shape[axis])).reshape(
        [-1 if at == axis else 1 for at in range(len(shape))]
    )
    return program.constant(np.broadcast_to(perm, shape).copy())


def left_node(program: Program, draw: random.Random) -> str | None:
    """Several nodes that leave elements behind and put zeros in their place, or divide by what is above zero."""
    ranked = [name for name, rows in program.arrays.items() if rows[0][0].dtype == np.float32 and rows[0][0].ndim]
    if not ranked or draw.random() < 0.5:
        return drawn_node(program, draw)
    one = draw.choice(ranked[-6:])
    shape = program.arrays[one][0][0].shape
    axis = draw.randrange(len(shape))

    def then(name: str | None, op: str, *more: str, **facts: Any) -> str | None:
        return None if name is None else program.add(op, [name, *more], **facts)

    def ints(*values: int) -> str:
        return program.constant(values)

    def like(name: str | None) -> str:
        """A value of the shape."""
        fit = [each for each in ranked if name and program.arrays[each][0][0].shape == program.arrays[name][0][0].shape]
        return draw.choice(fit or [one])

    if draw.random() < 0.25:  # above zero
        power = program.add("Exp", [one]) if draw.random() < 0.4 else program.add("Mul", [one, one])
        total = then(power, draw.choice(["ReduceSum", "ReduceMean", "Identity"]), *([ints(axis)] * draw.randint(0, 1)))
        total = then(total, "Add", program.constant(draw.choice([0.1, 0.1, 0, -0.1]), dtype=np.float32)) or total
        part = then(total, draw.choice(["Sqrt", "Reciprocal", "Log"]))
        return then(part, "Mul", draw.choice([one, program.constant(0, dtype=np.float32)]))
    start = draw.randint(0, shape[axis] - 1)
    stop = draw.randint(start + 1, shape[axis])
    part = program.add("Slice", [one, ints(start), ints(stop), ints(axis)])
    for _ in range(draw.randint(0, 2)):
        part = then(part, draw.choice(UNARY)) if draw.random() < 0.4 else then(part, draw.choice(BINARY), like(part))
    ends = [0] * len(shape)
    if draw.random() < 0.5:
        ends[axis] = start
        behind = [(shape[at] - stop) * (at == axis) for at in range(len(shape))]
        whole = then(part, "Pad", ints(*ends, *behind))
    else:
        zeros = [program.constant(np.zeros([*shape[:axis], size, *shape[axis + 1 :]]), dtype=np.float32)
                 for size in (start, shape[axis] - stop) if size]  # fmt: skip
        row = [*zeros[: bool(start)], part, *zeros[bool(start) :]]
        whole = None if None in row else program.add("Concat", row, axis=axis)  # type: ignore[list-item]
    for _ in range(draw.randint(0, 3)):
        op = draw.choice(["Add", "Mul", "Mul", "MatMul", "ReduceSum", "Transpose", "Sub"])
        more = [ints(draw.randrange(len(shape)))] if op == "ReduceSum" else [] if op == "Transpose" else [like(whole)]
        whole = then(whole, op, *more) or whole
    return whole


def drawn_model(draw: random.Random, node: Callable[[Program, random.Random], str | None] = drawn_node) -> Program:
    program = Program(1)
    for _ in range(3):
        shape = draw.choice(SHAPES)
        numbers = [np.random.default_rng(draw.randrange(1 << 30)) for _ in SEEDS]
        program.value([[each.standard_normal(shape, np.float32)] for each in numbers], program.inputs)
    for _ in range(40):
        if len(program.nodes) < 7:
            node(program, draw)
    return program


class Ranks(Program):
    """Members with the values of a model in forms; ``forms``: value of the model -> names, with the form."""

    def __init__(self, source: Program, members: int, draw: random.Random) -> None:
        super().__init__(members)
        self.source, self.draw, self.of = source, draw, dict[str, str]()
        self.forms: dict[str, list[tuple[str, Form]]] = {}
        for name in source.inputs:
            for _ in range(2):
                self._given(name)
        for node in source.nodes:
            for _ in range(6):
                operands = [self._operand(name) for name in node.input]
                facts = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
                results = len(node.output)
                if None not in operands and self.add(node.op_type, operands, results, **facts) is not None:  # type: ignore[arg-type]
                    for value, name in zip(node.output, self.nodes[-1].output):
                        self._note(value, name)

    def _note(self, value: str, name: str) -> None:
        """Add a value under a form that it has by its numbers."""
        due, actual = self.source.arrays[value], self.arrays[name]
        for form in ("whole", *range(due[0][0].ndim), "sum"):
            if all(fits(actual[seed], due[seed][0], form) for seed in SEEDS):
                self.forms.setdefault(value, []).append((name, form))
                return

    def _given(self, value: str) -> None:
        """An input, whole or a part of a dimension."""
        rows = [row[0] for row in self.source.arrays[value]]
        form: Form = self.draw.choice(["whole", *2 * [*range(rows[0].ndim)]])
        if isinstance(form, int) and rows[0].shape[form] < self.members:
            return
        parts = [self._parts(row, form) for row in rows]
        name = self.value(parts, self.inputs)
        self.of[name] = value
        self.forms.setdefault(value, []).append((name, form))

    def _parts(self, whole: np.ndarray, form: Form) -> list[np.ndarray]:
        if not isinstance(form, int):
            return [whole] * self.members
        return [np.take(whole, range(*cut), form) for cut in cuts(whole.shape[form], self.members)]

    def _operand(self, value: str) -> str | None:
        """A value in some form, made by a call where there is none."""
        if not value:
            return value
        if value in self.source.stored:
            array = self.source.arrays[value][0][0]
            if value in self.forms and self.draw.random() < 0.5:
                return self.constant(*self._of_members(array), dtype=array.dtype.type)
            self.forms.setdefault(value, [(self.constant(array, dtype=array.dtype.type), "whole")])
        if not self.forms.get(value):
            return None
        name, form = self.draw.choice(self.forms[value])
        if form == "whole" or self.draw.random() < 0.8:
            return name
        facts = {"reduce": "sum"} if form == "sum" else {
            "axis": form, "sizes": [part.shape[int(form)] for part in self.arrays[name][0]]
        }  # fmt: skip
        call = "AllReduce" if form == "sum" else "AllGather"
        result = self.add(call, [name], domain="gopt.comm", group="tp", **facts)
        if result is not None:
            self._note(value, result)
        return result

    def _of_members(self, array: np.ndarray) -> list[np.ndarray]:
        """A constant as it may be on each member: a part, or with a number that is a length or a place of a part."""
        if array.ndim and self.draw.random() < 0.4:
            axis = self.draw.randrange(array.ndim)
            return [np.take(array, range(*cut), axis) for cut in cuts(array.shape[axis], self.members)]
        arrays = [array.copy() for _ in range(self.members)]
        if array.dtype != np.int64 or not array.size:
            return arrays
        lengths = [4, 6, 12, 24, 3, 2, 8]
        for at in self.draw.sample(range(array.size), self.draw.choice([1, min(2, array.size)])):
            whole, way = int(array.reshape(-1)[at]), self.draw.randrange(3)
            parts = cuts(whole if way == 0 and whole > 0 else self.draw.choice(lengths), self.members)
            for mine, (start, stop) in zip(arrays, parts):
                mine.reshape(-1)[at] = stop - start if way == 0 else whole - start if way == 1 else start + whole
        return arrays

    def shown(self) -> dict[str, tuple[str, Form]]:
        """An output for the values of the model that no node reads: the model's value, and the form."""
        read = {name for node in self.source.nodes for name in node.input}
        shown: dict[str, tuple[str, Form]] = {}
        for value, forms in self.forms.items():
            own = [each for each in forms if each[0] not in (*self.inputs, *self.stored, *shown)]
            if value not in read and own:
                name, form = self.draw.choice(own)
                shown[name] = value, form
        return shown

    def relation(self, shown: dict[str, tuple[str, Form]]) -> dict[str, Any]:
        """What inputs and outputs of the ranks are of the model."""
        ranks = []
        for rank in range(self.members):
            inputs = {name: self._part(name, value, dict(self.forms[value])[name], rank)
                      for name, value in self.of.items()}  # fmt: skip
            outputs = {name: self._part(name, value, form, rank) for name, (value, form) in shown.items()}
            ranks.append({"rank": rank, "inputs": inputs, "outputs": outputs})
        return {"format": "gopt-relation/1", "forward": True, "mesh": {"tp": self.members}, "ranks": ranks}

    def _part(self, name: str, value: str, form: Form, rank: int) -> dict[str, Any]:
        if not isinstance(form, int):
            return {"of": value, "sum": "tp"} if form == "sum" else {"of": value}
        box = [[0, length] for length in self.source.arrays[value][0][0].shape]
        before = sum(part.shape[form] for part in self.arrays[name][0][:rank])
        box[form] = [before, before + self.arrays[name][0][rank].shape[form]]
        return {"of": value, "box": box}

    def again(self, shown: dict[str, tuple[str, Form]], seed: int) -> bool:
        """Return whether the outputs have the model's numbers on other inputs, also where these are no numbers."""
        source, mine, generator = deepcopy(self.source), deepcopy(self), np.random.default_rng(seed)
        for name in source.inputs:
            shape = source.arrays[name][0][0].shape
            numbers = generator.standard_normal(shape) * generator.choice([0.5, 1, 3])
            source.arrays[name] = [[np.asarray(numbers, np.float32)]]
        for name, value in mine.of.items():
            mine.arrays[name] = [mine._parts(source.arrays[value][0][0], dict(mine.forms[value])[name])]
        for program in (source, mine):
            for node in program.nodes:
                with np.errstate(all="ignore"):
                    rows = program.results(node, [program.operand(name, 0) for name in node.input])
                for at, name in enumerate(node.output):
                    program.arrays[name] = [[results[at] for results in rows]]
        return all(shows(mine.arrays[n][0], source.arrays[value][0][0], form) for n, (value, form) in shown.items())

    def edited(self, shown: Iterable[str]) -> Ranks | None:
        """The ranks with one edit of a node behind the outputs, run anew; None where it has no effect."""
        copy, needed = deepcopy(self), set(shown)
        copy.draw = self.draw
        for each in reversed(copy.nodes):
            needed.update(each.input if not needed.isdisjoint(each.output) else ())
        node = copy.draw.choice([each for each in copy.nodes if not needed.isdisjoint(each.output)])
        position = copy.nodes.index(node)
        before = [*copy.inputs, *copy.stored, *(each.output[0] for each in copy.nodes[:position])]
        kind = copy.draw.choice(["operand", "order", "attribute", "alike", "constant"])
        if kind == "operand":
            place = copy.draw.randrange(len(node.input))
            node.input[place] = copy.draw.choice(before)
        elif kind == "order":
            operands = copy.draw.sample(list(node.input), len(node.input))
            node.input[:] = operands
        elif kind == "attribute" and node.attribute:
            other(copy.draw.choice(node.attribute), copy.draw)
        elif kind == "alike" and (group := next((group for group in ALIKE if node.op_type in group), None)):
            node.op_type = copy.draw.choice(group)
        elif kind == "constant" and (stored := [name for name in node.input if name in copy.stored]):
            number, rows = copy.draw.choice([-1, 1, 2]), copy.arrays[copy.draw.choice(stored)]
            who = copy.draw.choice([range(1), range(copy.members), range(copy.members - 1, copy.members)])
            at = copy.draw.randrange(max(rows[0][0].size, 1))
            for row in rows:
                row[:] = [_other_number(each, at, number) if member in who else each for member, each in enumerate(row)]
        if node.SerializeToString() == self.nodes[position].SerializeToString() and kind != "constant":
            return None
        if any(len(set(each.output)) < len(each.output) for each in copy.nodes):
            return None
        nodes, copy.nodes = copy.nodes, []
        return copy if all(map(copy.append, nodes)) else None


def _other_number(array: np.ndarray, at: int, number: int) -> np.ndarray:
    changed = array.copy()
    if at < changed.size:
        changed.reshape(-1)[at] += number
    return changed


TEXTS = [
    [b"none", b"add", b"max", b"mul"],
    [b"constant", b"edge", b"reflect", b"wrap"],
    [b"floor", b"ceil", b"round_prefer_floor"],
]


def other(attribute: AttributeProto, draw: random.Random) -> None:
    """Another value of an attribute."""
    if attribute.name == "reduce":
        attribute.s = draw.choice(REDUCES)
    elif attribute.name == "equation":
        attribute.s = draw.choice(EQUATIONS).encode()
    elif attribute.type == AttributeProto.STRING:
        attribute.s = draw.choice(next((row for row in TEXTS if attribute.s in row), [attribute.s]))
    elif attribute.type == AttributeProto.INT:
        attribute.i = draw.choice([0, 1, 2, -1, -2])
    elif attribute.type == AttributeProto.INTS:
        ints = draw.sample(list(attribute.ints), len(attribute.ints))
        ints[draw.randrange(len(ints))] += draw.choice([0, 0, 1, -1])
        attribute.ints[:] = ints
