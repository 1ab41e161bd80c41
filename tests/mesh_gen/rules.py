"""Adjoints of what streams of tokens are made of, beside those of ``steps_gen.tape``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from steps_gen import tape
from steps_gen.tape import Adjoints, Record, Tape


def _turned(t: Tape, name: str) -> str:
    rank = len(t.shape(name))
    made: str = t.op("Transpose", name, perm=[*range(rank - 2), rank - 1, rank - 2])
    return made


def _matmul(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    """Of any rank of two or more; what was broadcast is summed by ``Adjoints.add``."""
    a, b = r.inputs
    to.add(b, t.op("MatMul", _turned(t, a), d))
    to.add(a, t.op("MatMul", d, _turned(t, b)))


def _concat(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    axis, start = r.attributes["axis"], 0
    for name in r.inputs:
        stop = start + t.shape(name)[axis]
        ends = (t.const([each], "int64") for each in (start, stop, axis))
        to.add(name, t.op("Slice", d, *ends))
        start = stop


def _slice(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    start, stop, axis = (int(t.values[name][0]) for name in r.inputs[1:4])
    shape = t.shape(r.inputs[0])
    front = [start if k == axis else 0 for k in range(len(shape))]
    back = [shape[axis] - stop if k == axis else 0 for k in range(len(shape))]
    to.add(r.inputs[0], t.op("Pad", d, t.const(front + back, "int64")))


def _cumsum(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    back = {**r.attributes, "reverse": 1 - r.attributes.get("reverse", 0)}
    to.add(r.inputs[0], t.op("CumSum", d, r.inputs[1], **back))


def _gather(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    """Along any axis: a product with the choice as a matrix, or a table whose rows are added up."""
    table, ids = r.inputs
    axis = r.attributes.get("axis", 0)
    if axis == 0:
        zeros = t.const(np.zeros(t.shape(table)))
        to.add(table, t.op("ScatterND", zeros, t.op("Unsqueeze", ids, t.const([-1], "int64")), d, reduction="add"))
        return
    hot = np.eye(t.shape(table)[axis], dtype=np.float32)[t.values[ids]]  # chosen, all
    assert axis == 1 and len(t.shape(table)) == 3
    to.add(table, t.op("MatMul", t.const(hot.T), d))


def _softmax(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    axis = r.attributes.get("axis", -1)
    inner = t.op("ReduceSum", t.op("Mul", d, r.output), t.const([axis], "int64"), keepdims=1)
    to.add(r.inputs[0], t.op("Mul", r.output, t.op("Sub", d, inner)))


def _where(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    zero = t.const(0.0)
    to.add(r.inputs[1], t.op("Where", r.inputs[0], d, zero))
    to.add(r.inputs[2], t.op("Where", r.inputs[0], zero, d))


def _reshaped(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], t.op("Reshape", d, t.const(t.shape(r.inputs[0]), "int64")))


def _expand(t: Tape, r: Record, d: str, to: Adjoints) -> None:
    to.add(r.inputs[0], d)


RULES: dict[str, tape.Rule] = {
    "MatMul": _matmul, "Concat": _concat, "Slice": _slice, "CumSum": _cumsum, "Gather": _gather, "Softmax": _softmax,
    "Where": _where, "Unsqueeze": _reshaped, "Squeeze": _reshaped, "Flatten": _reshaped, "Expand": _expand,
}  # fmt: skip


@contextmanager
def more_rules() -> Iterator[None]:
    """The tape with these rules in place of, and beside, its own."""
    before = dict(tape.RULES)
    tape.RULES.update(RULES)
    try:
        yield
    finally:
        tape.RULES.clear()
        tape.RULES.update(before)
