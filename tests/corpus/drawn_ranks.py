"""Drawn models, ranks that compute them in parts, and edits of both: numbers alone decide what is right."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
from node_models import info
from onnx import AttributeProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

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
]  # fmt: skip
UNARY, BINARY, REDUCTIONS, ROWS, COMPARISONS = ALIKE
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

    def add(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str | None:
        """The result of a node; None where its operands or its numbers do not allow it."""
        node = helper.make_node(op_type, inputs, [f"v{len(self.arrays)}"], **attributes)
        return node.output[0] if self.append(node) else None

    def append(self, node: NodeProto) -> bool:
        try:
            with np.errstate(all="ignore"):
                rows = [self.results(node, [self.arrays[name][seed] for name in node.input]) for seed in SEEDS]
        except Exception:  # an evaluator's exceptions have no common base
            return False
        every = [array for row in rows for array in row]
        if not all(array.size and np.isfinite(array).all() and np.abs(array).max() < 1e4 for array in every):
            return False
        self.nodes.append(node)
        self.arrays[node.output[0]] = rows
        return True

    def results(self, node: NodeProto, operands: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        if node.domain:
            return called(node, operands[0])
        evaluator = ReferenceEvaluator(node)
        return [
            np.asarray(evaluator.run(None, dict(zip(node.input, (operand[member] for operand in operands))))[0])
            for member in range(self.members)
        ]

    def model(self, member: int, outputs: Iterable[str]) -> ModelProto:
        def typed(name: str) -> ValueInfoProto:
            return info(name, self.arrays[name][0][member])

        stored = [numpy_helper.from_array(self.arrays[name][0][member], name) for name in self.stored]
        graph = helper.make_graph(self.nodes, "g", [*map(typed, self.inputs)], [*map(typed, outputs)], stored)
        versions = [helper.make_opsetid("", 18), helper.make_opsetid("gopt.comm", 1)]
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
    return one.shape == two.shape and np.allclose(one, two, rtol=1e-3, atol=1e-4)


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


def cuts(length: int, members: int) -> list[tuple[int, int]]:
    ends = [(length * index + members - 1) // members for index in range(members + 1)]
    return list(pairwise(ends))


def drawn_node(program: Program, draw: random.Random) -> str | None:
    """One more node, if its operands allow it."""
    floats = [name for name, rows in program.arrays.items() if rows[0][0].dtype == np.float32]
    flags = [name for name, rows in program.arrays.items() if rows[0][0].dtype == np.bool_]
    one, two = draw.choice(floats[-6:]), draw.choice(floats)
    rank = program.arrays[one][0][0].ndim
    axis = draw.randrange(rank) if rank else 0
    kind = draw.randrange(10)
    if kind == 0:
        return program.add(draw.choice(UNARY), [one])
    if kind <= 2 or not rank:
        number = program.constant(draw.choice([0.1, 2, -1, 3, 0.5]), dtype=np.float32)
        return program.add(draw.choice(BINARY), [one, draw.choice([two, two, number])])
    if kind == 3:
        axes = program.constant(sorted(draw.sample(range(rank), draw.randint(1, rank))))
        return program.add(draw.choice(REDUCTIONS), [one, axes], keepdims=draw.randint(0, 1))
    if kind == 4:
        return program.add(draw.choice(ROWS), [one], axis=axis)
    if kind == 5:
        return program.add("MatMul", [one, two])
    if kind == 6:
        return program.add("Transpose", [one], perm=draw.sample(range(rank), rank))
    if kind == 7:
        begin = draw.randrange(program.arrays[one][0][0].shape[axis])
        return program.add("Slice", [one, *(program.constant([end]) for end in (begin, begin + 3, axis))])
    if kind == 8:
        return program.add("Concat", [one, two], axis=axis)
    if flags and draw.random() < 0.5:
        return program.add("Where", [draw.choice(flags), one, two])
    return program.add(draw.choice([*COMPARISONS, "CumSum"]), [one, two if rank > 1 else program.constant(axis)])


def drawn_model(draw: random.Random) -> Program:
    program = Program(1)
    for _ in range(3):
        shape = draw.choice(SHAPES)
        numbers = [np.random.default_rng(draw.randrange(1 << 30)) for _ in SEEDS]
        program.value([[each.standard_normal(shape, np.float32)] for each in numbers], program.inputs)
    for _ in range(40):
        if len(program.nodes) < 7:
            drawn_node(program, draw)
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
                result = self.add(node.op_type, operands, **facts) if None not in operands else None
                if result is not None:
                    self._note(node.output[0], result)

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
        form: Form = self.draw.choice(["whole", *range(rows[0].ndim)])
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
        if value in self.source.stored and value not in self.forms:
            array = self.source.arrays[value][0][0]
            self.forms[value] = [(self.constant(array, dtype=array.dtype.type), "whole")]
        if not self.forms.get(value):
            return None
        name, form = self.draw.choice(self.forms[value])
        if form == "whole" or self.draw.random() < 0.6:
            return name
        facts = {"reduce": "sum"} if form == "sum" else {
            "axis": form, "sizes": [part.shape[int(form)] for part in self.arrays[name][0]]
        }  # fmt: skip
        call = "AllReduce" if form == "sum" else "AllGather"
        result = self.add(call, [name], domain="gopt.comm", group="tp", **facts)
        if result is not None:
            self._note(value, result)
        return result

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

    def edited(self) -> Ranks | None:
        """The ranks with one edit of a node, run anew; None where there is none, or it does not run."""
        copy = deepcopy(self)
        node = copy.draw.choice(copy.nodes)
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
            number = copy.draw.choice([-1, 1, 2])
            rows = copy.arrays[copy.draw.choice(stored)]
            for row in rows:
                row[:] = [row[0] + np.asarray(number, row[0].dtype), *row[1:]]
        if node.SerializeToString() == self.nodes[position].SerializeToString() and kind != "constant":
            return None
        nodes, copy.nodes = copy.nodes, []
        return copy if all(map(copy.append, nodes)) else None


def other(attribute: AttributeProto, draw: random.Random) -> None:
    """Another value of an attribute."""
    if attribute.name == "reduce":
        attribute.s = draw.choice(REDUCES)
    elif attribute.type == AttributeProto.INT:
        attribute.i = draw.randint(0, 2)
    elif attribute.type == AttributeProto.INTS:
        attribute.ints[:] = draw.sample(list(attribute.ints), len(attribute.ints))
