"""The backward of a step: one rule for an operator, some in several forms, as exporters and hands write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from whole_gen.writer import Record, Value, Writer

Grads = list[Value | None]


def gradients(loss: Value, of: Sequence[Value], start: Value | None = None) -> list[Value]:
    """The gradients of the loss for some values; ``start`` is that of the loss itself."""
    w = loss.w
    ways = {id(each) for each in of}
    for record in w.tape:
        if any(each is not None and id(each) in ways for each in record.inputs):
            ways |= {id(each) for each in record.outputs}
    parts: dict[int, list[Value]] = {id(loss): [start or w.const(np.array(1.0, loss.held.dtype))]}
    for record in reversed(list(w.tape)):
        if not any(id(each) in parts for each in record.outputs):
            continue
        if not any(each is not None and id(each) in ways for each in record.inputs):
            continue
        upper = [_total(w, parts.pop(id(each))) if id(each) in parts else None for each in record.outputs]
        for value, part in zip(record.inputs, RULES[record.op](w, record, upper, ways)):
            if value is not None and part is not None and id(value) in ways:
                parts.setdefault(id(value), []).append(part)
    found = [_total(w, parts[id(each)]) for each in of]
    w.gradients.update((each.name, gradient) for each, gradient in zip(of, found))
    return found


def detached(w: Writer, value: Value) -> Value:
    """The value as a constant: no gradient flows through what made it."""
    made = w.op("Identity", value)
    w.tape.pop()
    return made


def _total(w: Writer, parts: list[Value]) -> Value:
    if len(parts) > 1 and w.random.random() < 0.4:
        return w.op("Sum", *parts)
    found = parts[0]
    for part in parts[1:]:
        found = found + part if w.random.random() < 0.7 else part + found
    return found


def _narrow(w: Writer, value: Value, shape: tuple[int, ...]) -> Value:
    """Summed over what was broadcast."""
    if value.shape == shape:
        return value
    more = len(value.shape) - len(shape)
    axes = [*range(more)]
    axes += [more + place for place, size in enumerate(shape) if size == 1 and value.shape[more + place] != 1]
    how = w.random.choice(["sum", "sum", "ones", "steps"])
    if how == "ones" and axes == [0] and len(value.shape) == 2 and len(shape) == 1:
        ones = w.const(np.ones((1, value.shape[0]), value.held.dtype))
        return (ones @ value).reshape(*shape)
    if how == "steps" and axes:
        for axis in axes:
            value = value.sum(axis, keep=True)
    elif axes:
        value = value.sum(*axes, keep=True)
    return value.reshape(*shape) if value.shape != shape else value


def _matmul(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    (a, b), (d,) = r.inputs, up
    da = db = None
    n = len(b.shape)
    last = [*range(n - 2), n - 1, n - 2]
    if id(a) in ways:
        da = _narrow(w, d @ b.turn(*last), a.shape)
    if id(b) in ways:
        if n == 2:
            x, e = a, d
            if len(a.shape) > 2:
                x, e = a.reshape(-1, a.shape[-1]), d.reshape(-1, d.shape[-1])
            how = w.random.choice(["turn", "turn", "turned", "gemm", "einsum"])
            if how == "turn":
                db = x.turn(1, 0) @ e
            elif how == "turned":
                db = (e.turn(1, 0) @ x).turn(1, 0)
            elif how == "gemm":
                db = w.op("Gemm", x, e, transA=1)
            else:
                db = w.op("Einsum", x, e, equation="ni,no->io")
        else:
            m = len(a.shape)
            db = _narrow(w, a.turn(*range(m - 2), m - 1, m - 2) @ d, b.shape)
    return [da, db]


def _both(da: Callable[..., Value], db: Callable[..., Value]) -> Any:
    def rule(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
        a, b = r.inputs
        return [
            _narrow(w, da(a, b, up[0], r), a.shape) if id(a) in ways else None,
            _narrow(w, db(a, b, up[0], r), b.shape) if id(b) in ways else None,
        ]

    return rule


def _one(rule: Callable[[Value, Value, Value], Value]) -> Any:
    return lambda w, r, up, ways: [rule(r.inputs[0], r.outputs[0], up[0])]


def _relu(x: Value, y: Value, d: Value) -> Value:
    w = x.w
    mask = w.op("Greater", x if w.random.random() < 0.5 else y, w.like(0.0, x))
    return w.op("Where", mask, d, w.like(0.0, d)) if w.random.random() < 0.5 else d * mask.to(d.held.dtype)


def _spread(w: Writer, r: Record, d: Value) -> Value:
    """A reduced value's gradient with the dimensions of what was reduced."""
    x = r.inputs[0]
    axes = r.inputs[1].held.tolist() if len(r.inputs) > 1 else [*range(len(x.shape))]
    if not r.attributes.get("keepdims", 1):
        d = w.op("Unsqueeze", d, w.const(np.array(axes, np.int64))) if x.shape else d
    return w.op("Expand", d, w.const(np.array(x.shape, np.int64)))


def _reduce_sum(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    return [_spread(w, r, up[0])]


def _reduce_mean(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    n = r.inputs[0].held.size // max(r.outputs[0].held.size, 1)
    if w.random.random() < 0.5:
        return [_spread(w, r, up[0] / float(n))]
    return [_spread(w, r, up[0]) * float(1 / n)]


def _turned(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    return [up[0].turn(*np.argsort(r.attributes["perm"]).tolist())]


def _gather(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    """Rows of a table: scattered in one of five ways."""
    table, ids = r.inputs[:2]
    rows, width = table.shape[0], table.shape[1:]
    d, flat = up[0].reshape(-1, *width), ids.reshape(-1)
    if w.random.random() < 0.5:
        shape = w.const(np.array(table.shape, np.int64), "stored")
        zeros = w.op("ConstantOfShape", shape, value=_one_value(table))
    else:
        zeros = w.const(np.zeros_like(table.held))
    how = w.random.choice(["nd", "nd", "elements", "onehot", "equal"])
    if how == "nd" or len(width) != 1:
        return [w.op("ScatterND", zeros, flat.reshape(-1, 1), d, reduction="add"), None]
    if how == "elements":
        wide = w.op("Expand", flat.reshape(-1, 1), w.const(np.array(d.shape, np.int64)))
        return [w.op("ScatterElements", zeros, wide, d, axis=0, reduction="add"), None]
    if how == "onehot":
        pair = w.const(np.array([0, 1], np.float32))
        axis = w.random.choice([-1, 0])
        hot = w.op("OneHot", flat, w.const(np.array(rows, np.int64)), pair, axis=axis).to(d.held.dtype)
        return [(hot if axis == 0 else hot.turn(1, 0)) @ d, None]
    numbers = w.const(np.arange(rows)[:, None])
    return [w.op("Equal", numbers, flat.reshape(1, -1)).to(d.held.dtype) @ d, None]


def _one_value(like: Value) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.zeros(1, like.held.dtype))


def _gather_elements(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    x, ids = r.inputs
    zeros = x * 0.0 if w.random.random() < 0.3 else w.const(np.zeros_like(x.held))
    return [w.op("ScatterElements", zeros, ids, up[0], axis=r.attributes["axis"], reduction="add"), None]


def _softmax(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    y, d = r.outputs[0], up[0]
    return [(d - (d * y).sum(-1, keep=True)) * y]


def _log_softmax(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    y, d = r.outputs[0], up[0]
    return [d - w.op("Exp", y) * d.sum(-1, keep=True)]


def _where(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    mask, a, b = r.inputs
    zero = w.like(0.0, up[0])
    return [None, _narrow(w, w.op("Where", mask, up[0], zero), a.shape) if id(a) in ways else None,
            _narrow(w, w.op("Where", mask, zero, up[0]), b.shape) if id(b) in ways else None]  # fmt: skip


def _concat(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    axis = r.attributes["axis"]
    sizes = w.const(np.array([each.shape[axis] for each in r.inputs], np.int64))
    return list(w.op("Split", up[0], sizes, out=len(r.inputs), axis=axis))


def _split(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    parts = [d if d is not None else w.const(np.zeros_like(o.held)) for d, o in zip(up, r.outputs)]
    return [w.op("Concat", *parts, axis=r.attributes["axis"])]


def _as_before(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    return [up[0].reshape(*r.inputs[0].shape)]


def _expand(w: Writer, r: Record, up: Grads, ways: set[int]) -> Grads:
    return [_narrow(w, up[0], r.inputs[0].shape)]


RULES: dict[str, Callable[[Writer, Record, Grads, set[int]], Grads]] = {
    "MatMul": _matmul,
    "Add": _both(lambda a, b, d, r: d, lambda a, b, d, r: d),
    "Sub": _both(lambda a, b, d, r: d, lambda a, b, d, r: -d),
    "Mul": _both(lambda a, b, d, r: d * b, lambda a, b, d, r: d * a),
    "Div": _both(lambda a, b, d, r: d / b, lambda a, b, d, r: -(d * a) / (b * b)),
    "Neg": _one(lambda x, y, d: -d),
    "Relu": _one(_relu),
    "Tanh": _one(lambda x, y, d: d * (1.0 - y * y)),
    "Sigmoid": _one(lambda x, y, d: d * (y * (1.0 - y))),
    "Exp": _one(lambda x, y, d: d * y),
    "Log": _one(lambda x, y, d: d / x),
    "Sqrt": _one(lambda x, y, d: d / (y * 2.0)),
    "Identity": _one(lambda x, y, d: d),
    "Cast": _one(lambda x, y, d: d.to(x.held.dtype)),
    "ReduceSum": _reduce_sum, "ReduceMean": _reduce_mean, "Transpose": _turned, "Reshape": _as_before,
    "Unsqueeze": _as_before, "Squeeze": _as_before, "Gather": _gather, "GatherElements": _gather_elements,
    "Softmax": _softmax, "LogSoftmax": _log_softmax, "Where": _where, "Concat": _concat, "Split": _split,
    "Expand": _expand,
}  # fmt: skip
