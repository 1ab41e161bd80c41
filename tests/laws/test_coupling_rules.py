"""Single operators on drawn shapes: what is told of their results' samples is true by numbers, and nothing crashes.

Ranks 0 to 5, operands that broadcast in both directions, negative axes, axes as attributes and as inputs, old opsets.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from node_models import model_of
from onnx import ModelProto, TensorProto, helper, numpy_helper
from operator_forms import Case, forms
from operator_probes import Probe

from gopt.analysis.coupling.context import CouplingContext
from gopt.analysis.coupling.marks import Mark, Relation
from gopt.analysis.coupling.propagate import propagate, start
from gopt.errors import InputError
from gopt.ir.graph_index import GraphIndex
from gopt.ir.load import load
from gopt.operators.table import OPERATORS

SEEDS = range(int(os.environ.get("GOPT_DRAWN", "120")))
BATCH = 3
OPSETS = (7, 9, 11, 12, 13, 17, 18, 20, 21, 23)


class Drawn:
    """One or two operators behind a transposed batch; equal for every number of samples but in its size."""

    def __init__(self, seed: int, samples: int) -> None:
        self.dice, self.n = random.Random(seed), samples
        self.values = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[TensorProto] = []
        self.opset = self.dice.choice(OPSETS)
        rank = self.dice.randint(1, 5)
        self.shape = [samples, *(self.dice.randint(1, 3) for _ in range(rank - 1))]
        self.batch = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(self.shape))]
        order = list(range(rank))
        self.dice.shuffle(order)
        self.value = self.op("Transpose", "x", perm=order)
        self.shape, self.axis = [self.shape[place] for place in order], order.index(0)
        for _ in range(self.dice.randint(1, 2)):
            self.dice.choice(MOVES)(self)

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"v{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names[0]

    def const(self, value: object, dtype: object = np.float32) -> str:
        name = f"c{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def floats(self, shape: list[int]) -> str:
        """A constant that is the same for every sample, as long as its shape has no dimension of them."""
        return self.const(self.values.standard_normal(shape))

    def some_axis(self) -> int:
        axis = self.dice.randrange(len(self.shape))
        return axis - len(self.shape) if self.dice.random() < 0.5 else axis

    def broadcast(self) -> tuple[list[int], int]:
        """The shape of an operand beside the value, and how many dimensions it adds in front."""
        more = self.dice.randint(0, 2) if len(self.shape) < 4 else 0
        front = [self.dice.randint(1, 3) for _ in range(more)]
        tail = [1 if place == self.axis or self.dice.random() < 0.4 else size for place, size in enumerate(self.shape)]
        return [*front, *tail][self.dice.randint(0, more + len(tail)) :] if not more else [*front, *tail], more

    def grown(self, front: list[int]) -> None:
        self.shape, self.axis = [*front, *self.shape], self.axis + len(front)

    # --- moves ------------------------------------------------------------------------------------------------------

    def beside(self) -> None:
        shape, more = self.broadcast()
        other, kind = self.floats(shape), self.dice.choice(["Add", "Sub", "Mul", "Div", "Max", "Where", "Pow"])
        if kind == "Max" and self.opset < 8:
            kind = "Add"
        if kind == "Where" and self.opset < 9:
            kind = "Mul"
        pair = [self.value, other] if self.dice.random() < 0.5 else [other, self.value]
        if kind == "Where":
            pair = [self.const(np.ones(shape), np.bool_), *pair]
        if kind in ("Div", "Pow"):
            pair = [self.op("Abs", each) for each in pair]
        self.value = self.op(kind, *pair)
        self.grown(shape[:more])

    def expand(self) -> None:
        if self.opset < 8:
            return
        more = [self.dice.randint(1, 3) for _ in range(self.dice.randint(0, 2) if len(self.shape) < 4 else 0)]
        sizes = [*more, *(1 if place == self.axis else size for place, size in enumerate(self.shape))]
        self.value = self.op("Expand", self.value, self.const(sizes, np.int64))
        self.grown(more)

    def typed(self) -> None:
        if self.opset < 15:
            return
        one = self.op("CastLike", self.const(2, np.int32), self.value)
        sizes = self.op("Shape", self.value)
        self.value = self.op("Mul", self.op("Expand", one, sizes), self.value)

    def unsqueeze(self) -> None:
        rank = len(self.shape) + 1
        axis = self.dice.randrange(rank)
        given = axis - rank if self.opset >= 11 and self.dice.random() < 0.5 else axis
        if self.opset < 13:
            self.value = self.op("Unsqueeze", self.value, axes=[given])
        else:
            self.value = self.op("Unsqueeze", self.value, self.const([given], np.int64))
        self.shape.insert(axis, 1)
        self.axis += axis <= self.axis

    def squeeze(self) -> None:
        places = [place for place, size in enumerate(self.shape) if size == 1 and place != self.axis]
        if not places:
            return
        if self.dice.random() < 0.3:
            self.value = self.op("Squeeze", self.value)
            gone = places
        elif self.opset < 13:
            gone = [self.dice.choice(places)]
            self.value = self.op("Squeeze", self.value, axes=gone)
        else:
            gone = [self.dice.choice(places)]
            self.value = self.op("Squeeze", self.value, self.const([gone[0] - len(self.shape)], np.int64))
        self.axis -= sum(place < self.axis for place in gone)
        self.shape = [size for place, size in enumerate(self.shape) if place not in gone]

    def reduce(self) -> None:
        if not self.shape:
            return
        kind = self.dice.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceSumSquare"])
        keep, axis = self.dice.randint(0, 1), self.some_axis()
        if self.opset < 11:
            axis %= len(self.shape)
        every = self.dice.random() < 0.2
        if every:
            self.value = self.op(kind, self.value, keepdims=keep)
        elif self.opset < (13 if kind == "ReduceSum" else 18):
            self.value = self.op(kind, self.value, axes=[axis], keepdims=keep)
        else:
            self.value = self.op(kind, self.value, self.const([axis], np.int64), keepdims=keep)
        places = list(range(len(self.shape))) if every else [axis % len(self.shape)]
        self.shape = [1 if place in places else size for place, size in enumerate(self.shape)] if keep else [
            size for place, size in enumerate(self.shape) if place not in places
        ]  # fmt: skip
        self.axis = min(self.axis, max(len(self.shape) - 1, 0)) if keep else max(
            self.axis - sum(place < self.axis for place in places), 0
        )  # fmt: skip

    def clip(self) -> None:
        if self.opset < 11:
            self.value = self.op("Clip", self.value, max=0.5)
        else:
            self.value = self.op("Clip", self.value, "", self.const(0.5))

    def soft(self) -> None:
        if not self.shape:
            return
        axis = self.some_axis() if self.opset >= 13 else self.dice.randrange(len(self.shape))
        self.value = self.op("Softmax", self.value, axis=axis)

    def product(self) -> None:
        if not self.shape or self.axis == len(self.shape) - 1:
            return
        self.value = self.op("MatMul", self.value, self.floats([self.shape[-1], 2]))
        self.shape[-1] = 2

    def vector(self) -> None:
        if not self.shape or self.axis == len(self.shape) - 1:
            return
        self.value = self.op("MatMul", self.value, self.floats([self.shape[-1]]))
        self.shape.pop()

    def gather(self) -> None:
        if not self.shape:
            return
        axis = self.some_axis()
        if axis % len(self.shape) == self.axis or (self.opset < 11 and axis < 0):
            return
        rank = self.dice.randint(0, 2)
        picked = np.zeros([2] * rank, np.int64)
        self.value = self.op("Gather", self.value, self.const(picked, np.int64), axis=axis)
        axis %= len(self.shape)
        self.shape[axis : axis + 1] = [2] * rank
        self.axis += rank - 1 if axis < self.axis else 0

    def flatten(self) -> None:
        rank = len(self.shape)
        axis = self.dice.randint(0, rank)
        self.value = self.op("Flatten", self.value, axis=axis)
        self.shape = [int(np.prod(self.shape[:axis])), int(np.prod(self.shape[axis:]))]
        self.axis = 0 if self.axis < axis else 1

    def turned(self) -> None:
        if self.shape:
            self.value = self.op("Transpose", self.value)  # reversed without perm
            self.shape, self.axis = self.shape[::-1], len(self.shape) - 1 - self.axis

    def model(self) -> ModelProto:
        self.nodes.append(helper.make_node("Identity", [self.value], ["out"]))
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "drawn", self.batch, [out], self.stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        model.graph.output[0].CopyFrom(inferred.graph.output[0])
        return model


MOVES = [
    Drawn.beside, Drawn.beside, Drawn.expand, Drawn.typed, Drawn.unsqueeze, Drawn.squeeze, Drawn.reduce, Drawn.reduce,
    Drawn.clip, Drawn.soft, Drawn.product, Drawn.vector, Drawn.gather, Drawn.flatten, Drawn.turned,
]  # fmt: skip


def marked(model: ModelProto, path: Path) -> CouplingContext:
    onnx.save(model, path)
    graph = load(path)
    context = start(graph, ["x"])
    propagate(context, graph.nodes)
    return context


DIMS = sorted(name for name, each in OPERATORS.items() if each.dims is not None)


def used(op_type: str, case: Case, dim: int, half: int, path: Path) -> CouplingContext | None:
    """The samples of a use, of which ``dim`` of operand 0 counts them; None where fewer of them are no use."""
    first = case.inputs[0].take(range(half), dim)
    inputs = (first, *case.inputs[1:])
    try:
        Probe(op_type, replace(case, inputs=inputs), wide=False).result()
    except Exception:
        return None
    names = [f"x{place}" if each is not None else "" for place, each in enumerate(inputs)]
    node = helper.make_node(op_type, names, [f"y{place}" for place in range(case.results)], **case.attributes)
    stored = {name: each for name, each in zip(names[1:], inputs[1:]) if each is not None}
    model = model_of([node], {"x0": first}, ["y0"], opset=case.opset, stored=stored, ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model, data_prop=True), path)
    try:
        context = CouplingContext(GraphIndex(load(path)), half)
    except InputError:
        return None
    context.marks["x0"] = Mark(Relation.SAMPLES, dim)
    propagate(context, context.index.graph.nodes)
    return context


@pytest.mark.parametrize("op_type", DIMS)
def test_what_is_told_of_uses_is_true(op_type: str, tmp_path: Path) -> None:
    """Every operator whose record has dimensions: by a rule of its own, or by these dimensions."""
    told = 0
    for case in forms(op_type):
        x = case.inputs[0]
        for dim, size in enumerate(x.shape if x is not None else ()):
            context = used(op_type, case, dim, size // 2, tmp_path / "m.onnx") if size > 3 else None
            mark = None if context is None or context.found else context.marks.get("y0")
            if mark is None or mark.kind is not Relation.SAMPLES or (mark.outer, mark.inner) != (1, 1):
                continue
            large = x.take(range(size // 2 * 2), dim)
            uses = (replace(case, inputs=(each, *case.inputs[1:])) for each in (large, *np.split(large, 2, dim)))
            whole, *parts = (Probe(op_type, each, wide=False).result() for each in uses)
            if whole.shape == parts[0].shape:
                continue  # a constant holds the number of samples
            told += 1
            np.testing.assert_allclose(np.concatenate(parts, mark.axis), whole, rtol=1e-4, atol=1e-5)
    assert told or op_type in UNTOLD


UNTOLD = frozenset({
    "Attention", "BitShift", "Conv", "ConvTranspose", "DequantizeLinear", "GatherElements", "GatherND", "GlobalLpPool",
    "GroupNormalization", "Mod", "NegativeLogLikelihoodLoss", "ReverseSequence", "RotaryEmbedding", "ScatterElements",
    "ScatterND", "SoftmaxCrossEntropyLoss", "Where",
})  # fmt: skip
"""Operators whose uses have few rows, or other operands that hold samples."""


def compared(context: CouplingContext) -> bool:
    """Return whether something is told of the result that numbers can contradict."""
    mark = context.marks.get("out")
    return not context.found and (
        mark is None
        or mark.kind is Relation.SAMPLES
        or (mark.kind in (Relation.SUM, Relation.MEAN) and mark.even)  # else it has a bound from below
    )


def test_most_of_what_is_drawn_is_compared(tmp_path: Path) -> None:
    found = [marked(Drawn(seed, BATCH).model(), tmp_path / "m.onnx") for seed in range(40)]
    assert sum(map(compared, found)) > 30


def run(model: ModelProto, x: np.ndarray) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    return np.asarray(ReferenceEvaluator(model).run(None, {"x": x})[0])


def joined(mark: Mark, parts: list[np.ndarray]) -> np.ndarray:
    """The value of the large batch that a mark of samples says."""
    split = [
        each.reshape(*each.shape[: mark.axis], mark.outer, BATCH, mark.inner, *each.shape[mark.axis + 1 :])
        for each in parts
    ]
    whole = np.concatenate(split, mark.axis + 1)
    return whole.reshape(*parts[0].shape[: mark.axis], -1, *parts[0].shape[mark.axis + 1 :])


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_told_of_samples_is_true(seed: int, tmp_path: Path) -> None:
    model, large = Drawn(seed, BATCH).model(), Drawn(seed, 2 * BATCH).model()
    shape = [each.dim_value for each in model.graph.input[0].type.tensor_type.shape.dim]
    context = marked(model, tmp_path / "m.onnx")
    mark = context.marks.get("out")
    if not compared(context):
        return
    parts = [np.random.default_rng([seed, part]).standard_normal(shape).astype(np.float32) for part in range(2)]
    made, whole = [run(model, part) for part in parts], run(large, np.concatenate(parts))
    if mark is None:
        expected = made[0]
    elif mark.kind is Relation.SAMPLES:
        expected = joined(mark, made)
    else:
        expected = made[0] + made[1] if mark.kind is Relation.SUM else (made[0] + made[1]) / 2
    assert whole.shape == expected.shape
    np.testing.assert_allclose(whole, expected, rtol=2e-4, atol=1e-5)
