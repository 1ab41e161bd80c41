"""Write a forward node by node, and its backward after it: the generator knows each parameter's true gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers import Builder
from node_models import evaluated
from onnx import GraphProto, helper


@dataclass(frozen=True)
class Record:
    """One node of the forward: what it read and made."""

    op_type: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]


@dataclass
class Tape(Builder):
    """A builder that knows the value of everything it writes, and so its shape and type."""

    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.seed)
        self.values: dict[str, np.ndarray] = {}
        self.forward: list[Record] = []
        self.recording = True
        self.count = 0
        self.part = ""
        self.parts: dict[str, str] = {}
        """Node -> the part of the step it was written for: empty for forward and backward."""

    def input(self, name: str, shape: Any, dtype: str = "float32", value: Any = None) -> str:
        super().input(name, shape, dtype)
        if value is None:
            value = self.generator.standard_normal(shape)
        self.values[name] = np.asarray(value, dtype).reshape(shape)
        return name

    def state(self, name: str, value: np.ndarray, *, stored: bool = True) -> str:
        value = np.asarray(value)
        super().state(name, value, stored=stored)
        self.values[name] = value
        return name

    def const(self, value: Any, dtype: str = "float32") -> str:
        name = super().const(value, dtype)
        self.values[name] = np.asarray(value, dtype)
        return name

    def op(self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        self.count += 1  # names stay apart although nodes are dropped
        names = [f"v{self.count}_{slot}" for slot in range(outputs)]
        made = names[0] if outputs == 1 else names
        node = helper.make_node(op_type, inputs, names, name=f"n{self.count}", **attributes)
        self.nodes.append(node)
        self.parts[node.name] = self.part
        read = sorted({name for name in (*inputs, *_captured(attributes)) if name in self.values})
        found = evaluated([node], {name: self.values[name] for name in read}, names)
        self.values.update(zip(names, found, strict=True))
        if self.recording and outputs == 1:
            self.forward.append(Record(op_type, tuple(inputs), made, attributes))
        return made

    def shape(self, name: str) -> tuple[int, ...]:
        return self.values[name].shape

    def dtype(self, name: str) -> str:
        return str(self.values[name].dtype)

    def like(self, value: Any, name: str) -> str:
        """A constant of the same type as ``name``."""
        return self.const(value, self.dtype(name))

    def cast(self, name: str, dtype: str) -> str:
        from helpers import CODES

        made: str = name if self.dtype(name) == dtype else self.op("Cast", name, to=CODES[dtype])
        return made

    def reshape(self, name: str, shape: tuple[int, ...]) -> str:
        if self.shape(name) == shape:
            return name
        made: str = self.op("Reshape", name, self.const(shape, "int64"))
        return made

    def fit(self, name: str, shape: tuple[int, ...]) -> str:
        """The adjoint of a broadcast: summed over what was repeated."""
        found = self.shape(name)
        if found == shape:
            return name
        extra = len(found) - len(shape)
        padded = (1,) * extra + shape
        axes = [k for k, size in enumerate(padded) if k < extra or (size == 1 and found[k] != 1)]
        if not axes:
            return self.reshape(name, shape)
        if len(axes) == len(found):
            total = self.op("ReduceSum", name, keepdims=0)
        else:
            kept = tuple(size for k, size in enumerate(found) if k not in axes)
            total = self.op("ReduceSum", name, self.const(axes, "int64"), keepdims=0)
            assert self.shape(total) == kept
        return self.reshape(total, shape)


def _captured(attributes: dict[str, Any]) -> list[str]:
    """What the bodies of an If read of the graph around them."""
    bodies = [body for body in attributes.values() if isinstance(body, GraphProto)]
    return [name for body in bodies for node in body.node for name in node.input]


# --- the backward -----------------------------------------------------------------------------------------------------


@dataclass
class Adjoints:
    """What flows back to each value, summed."""

    tape: Tape
    of: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, adjoint: str) -> None:
        adjoint = self.tape.fit(adjoint, self.tape.shape(name))
        self.of[name] = self.tape.op("Add", self.of[name], adjoint) if name in self.of else adjoint


Rule = Callable[[Tape, Record, str, Adjoints], None]
"""Tape, node, what flows back to its output, where it goes."""


def _turned(t: Tape, name: str) -> str:
    rank = len(t.shape(name))
    made: str = t.op("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2])
    return made


def _matmul(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    """Of any rank of two or more; what was broadcast is summed by ``Adjoints.add``."""
    a, b = r.inputs
    to.add(b, t.op("MatMul", _turned(t, a), d))
    to.add(a, t.op("MatMul", d, _turned(t, b)))


def _add(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    for name in r.inputs:
        to.add(name, d)


def _sub(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], d)
    to.add(r.inputs[1], t.op("Neg", d))


def _mul(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    a, b = r.inputs
    to.add(a, t.op("Mul", d, b))
    to.add(b, t.op("Mul", d, a))


def _div(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    a, b = r.inputs
    to.add(a, t.op("Div", d, b))
    to.add(b, t.op("Neg", t.op("Div", t.op("Mul", d, r.output), b)))


def _tanh(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.op("Mul", d, t.op("Sub", t.like(1.0, d), t.op("Mul", r.output, r.output))))


def _sigmoid(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    slope = t.op("Mul", r.output, t.op("Sub", t.like(1.0, d), r.output))
    to.add(r.inputs[0], t.op("Mul", d, slope))


def _relu(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    open_ = t.op("Greater", r.inputs[0], t.like(0.0, d))
    to.add(r.inputs[0], t.op("Where", open_, d, t.like(0.0, d)))


def _softplus(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.op("Mul", d, t.op("Sigmoid", r.inputs[0])))


def _exp(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.op("Mul", d, r.output))


def _sqrt(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.op("Div", t.op("Mul", d, t.like(0.5, d)), r.output))


def _reduce(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    shape = t.shape(r.inputs[0])
    if not r.attributes.get("keepdims", 1):
        axes = [int(k) % len(shape) for k in t.values[r.inputs[1]]] if len(r.inputs) > 1 else list(range(len(shape)))
        d = t.reshape(d, tuple(1 if k in axes else size for k, size in enumerate(shape)))
    if r.op_type == "ReduceMean":
        count = t.values[r.inputs[0]].size // max(t.values[r.output].size, 1)
        d = t.op("Mul", d, t.like(1.0 / count, d))
    to.add(r.inputs[0], t.op("Expand", d, t.const(shape, "int64")))


def _transpose(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    perm = r.attributes["perm"]
    to.add(r.inputs[0], t.op("Transpose", d, perm=[perm.index(k) for k in range(len(perm))]))


def _reshape(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.op("Reshape", d, t.const(t.shape(r.inputs[0]), "int64")))


def _cast(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.cast(d, t.dtype(r.inputs[0])))


def _gather(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    """Rows of a table: their adjoints are added where they came from; along axis 1 a product with the choice."""
    table, ids = r.inputs
    if r.attributes.get("axis", 0):
        hot = np.eye(t.shape(table)[1], dtype=np.float32)[t.values[ids]]  # chosen, all
        to.add(table, t.op("MatMul", t.const(hot.T), d))
        return
    if t.dtype(d) == "float16":  # no runtime adds halves in place
        hot = t.cast(t.op("OneHot", ids, t.const(t.shape(table)[0], "int64"), t.const([0.0, 1.0])), "float16")
        to.add(table, t.op("MatMul", t.op("Transpose", hot, perm=[1, 0]), d))
        return
    zeros = t.const(np.zeros(t.shape(table)), t.dtype(table))
    rows = t.op("Unsqueeze", ids, t.const([-1], "int64"))
    to.add(table, t.op("ScatterND", zeros, rows, d, reduction="add"))


def _softmax(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    axis = r.attributes.get("axis", -1)
    inner = t.op("ReduceSum", t.op("Mul", d, r.output), t.const([axis], "int64"), keepdims=1)
    to.add(r.inputs[0], t.op("Mul", r.output, t.op("Sub", d, inner)))


def _neg(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.op("Neg", d))


def _identity(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], d)


def _slice(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    """A range along an axis: the rest gets nothing."""
    start, stop, axis = (int(t.values[name][0]) for name in r.inputs[1:4])
    shape = t.shape(r.inputs[0])
    front = [start if k == axis else 0 for k in range(len(shape))]
    back = [shape[axis] - stop if k == axis else 0 for k in range(len(shape))]
    to.add(r.inputs[0], t.op("Pad", d, t.const(front + back, "int64")))


def _concat(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    axis, start = r.attributes["axis"], 0
    for name in r.inputs:
        stop = start + t.shape(name)[axis]
        ends = (t.const([each], "int64") for each in (start, stop, axis))
        to.add(name, t.op("Slice", d, *ends))
        start = stop


def _cumsum(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    back = {**r.attributes, "reverse": 1 - r.attributes.get("reverse", 0)}
    to.add(r.inputs[0], t.op("CumSum", d, r.inputs[1], **back))


def _where(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    zero = t.const(0.0)
    to.add(r.inputs[1], t.op("Where", r.inputs[0], d, zero))
    to.add(r.inputs[2], t.op("Where", r.inputs[0], zero, d))


def _max(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    """Of two values; the first takes all where both are equal."""
    one, other = r.inputs
    first, zero = t.op("GreaterOrEqual", one, other), t.const(0.0)
    to.add(one, t.op("Where", first, d, zero))
    to.add(other, t.op("Where", first, zero, d))


def _tile(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    shape, times = t.shape(r.inputs[0]), t.values[r.inputs[1]]
    apart = [size for pair in zip(times, shape) for size in map(int, pair)]
    made = t.op("Reshape", d, t.const(apart, "int64"))
    to.add(r.inputs[0], t.op("ReduceSum", made, t.const(range(0, len(apart), 2), "int64"), keepdims=0))


def _conv(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    """No strides and no padding: both adjoints are convolutions again."""
    x, w = r.inputs
    turned = [t.op("Transpose", name, perm=[1, 0, 2, 3]) for name in (x, d)]
    to.add(w, t.op("Transpose", t.op("Conv", *turned), perm=[1, 0, 2, 3]))
    to.add(x, t.op("ConvTranspose", d, w))


RULES: dict[str, Rule] = {
    "MatMul": _matmul, "Add": _add, "Sub": _sub, "Mul": _mul, "Div": _div, "Tanh": _tanh, "Sigmoid": _sigmoid,
    "Relu": _relu, "Softplus": _softplus, "Exp": _exp, "Sqrt": _sqrt, "ReduceMean": _reduce, "ReduceSum": _reduce,
    "Transpose": _transpose, "Reshape": _reshape, "Cast": _cast, "Gather": _gather, "Softmax": _softmax, "Neg": _neg,
    "Identity": _identity, "Slice": _slice, "Conv": _conv, "Concat": _concat, "CumSum": _cumsum, "Where": _where,
    "Unsqueeze": _reshape, "Squeeze": _reshape, "Flatten": _reshape, "Expand": _identity, "Max": _max, "Tile": _tile,
}  # fmt: skip


def backward(tape: Tape, output: str, adjoint: str, wanted: set[str]) -> dict[str, str]:
    """Write the backward of what the tape has recorded, as far as a parameter needs it; parameter -> its gradient."""
    tape.recording = False
    leads = set(wanted)
    for record in tape.forward:
        if leads.intersection(record.inputs):
            leads.add(record.output)
    to = Adjoints(tape, {output: adjoint})
    for record in reversed(tape.forward):
        if record.output in to.of and record.output in leads:
            RULES[record.op_type](tape, record, to.of[record.output], to)
    _drop_unread(tape, {to.of[name] for name in wanted if name in to.of})
    return {name: to.of[name] for name in wanted if name in to.of}


def _drop_unread(tape: Tape, wanted: set[str]) -> None:
    """The rules also write adjoints of the batch; no step that was exported holds them."""
    made = {record.output for record in tape.forward}
    needed = set(wanted)
    kept = []
    for node in reversed(tape.nodes):
        if made.intersection(node.output) or needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    tape.nodes[:] = reversed(kept)
