"""A whole step of a seed: forward, backward, what is done to all gradients, updates, metrics."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import FORWARDS
from whole_gen.updates import UPDATES, Shared
from whole_gen.writer import Value, Writer


def written(seed: int, samples: int, scale: int = 1, dtype: object = np.float64) -> Writer:
    """The step of a seed for so many samples."""
    w = Writer(seed, samples, scale, dtype)
    rate = w.setting("lr", 0.1) if w.pick(True, False) else w.const(np.array(0.1, w.dtype))
    loss, params = w.pick(*FORWARDS)(w)
    wide, start = loss, None
    scaled = w.pick("none", "none", "none", "fixed", "fed", "state")
    factor: Value | None = None
    if scaled != "none":
        factor = {"fixed": lambda: w.const(np.array(8.0, w.dtype)), "fed": lambda: w.setting("scale", 8.0),
                  "state": lambda: w.state("scale", np.array(8.0, w.dtype))}[scaled]()  # fmt: skip
        if w.pick(True, False):
            wide = loss * factor
        else:
            start = factor
    found = dict(zip(params, gradients(wide, list(params.values()), start)))
    if factor is not None:
        back = factor if w.pick(True, False) else None
        inverse = None if back is not None else 1.0 / factor
        found = {n: g / back if back is not None else g * inverse for n, g in found.items()}
    good = None
    if w.pick(*[False] * 4, True) or scaled == "state":
        good = finite(w, list(found.values()))
    found = clipped(w, found)
    rate, shared = schedule(w, rate)
    shared.rate = rate
    rules = [w.pick(*UPDATES) for _ in range(w.pick(1, 2, 3))]
    new = {}
    for place, (name, value) in enumerate(params.items()):
        g = found[name]
        if w.random.random() < 0.2:
            g = g + value * 0.01
        new[name] = rules[place % len(rules)](w, value, g, shared)
        if w.random.random() < 0.15:
            new[name] = new[name] - value * (rate * 0.01)
    for name, value in params.items():
        if new[name].shape != value.shape:  # a rate of shape [1] on a scalar
            new[name] = new[name].reshape(*value.shape)
        final = new[name] if good is None else w.op("Where", good, new[name], value)
        w.becomes(value, final)
    if scaled == "state" and factor is not None and good is not None:
        w.becomes(factor, w.op("Where", good, factor * 1.5, factor * 0.5))
    if w.pick(True, False):
        w.out("loss", loss)
    else:
        w.out("loss", loss * 1.0)
    if w.pick(*[False] * 4, True):
        w.out("norm", total_norm(w, list(found.values())))
    return w


def finite(w: Writer, grads: list[Value]) -> Value:
    how = w.pick("each", "sum")
    if how == "sum":
        total = None
        for g in grads:
            part = (g * 0.0).sum()
            total = part if total is None else total + part
        return w.op("Equal", total, w.const(np.array(0.0, w.dtype)))
    bad = None
    for g in grads:
        part = w.op("Or", w.op("IsNaN", g), w.op("IsInf", g))
        part = w.op("ReduceMax", part.to(np.int32), keepdims=0)
        bad = part if bad is None else w.op("Max", bad, part)
    return w.op("Equal", bad, w.const(np.array(0, np.int32)))


def total_norm(w: Writer, grads: list[Value]) -> Value:
    how = w.pick("sum", "concat", "l2")
    if how == "concat":
        row = w.op("Concat", *(g.reshape(-1) for g in grads), axis=0)
        return (row * row).sum().sqrt()
    if how == "l2":
        norms = [w.op("ReduceL2", g, keepdims=0).reshape(1) for g in grads]
        row = w.op("Concat", *norms, axis=0) if len(norms) > 1 else norms[0]
        return w.op("ReduceL2", row, keepdims=0)
    total = (grads[0] * grads[0]).sum()
    for g in grads[1:]:
        total = total + (g * g).sum()
    return total.sqrt()


def clipped(w: Writer, found: dict[str, Value]) -> dict[str, Value]:
    how = w.pick("none", "none", "none", "global", "own", "value", "infinity", "mean")
    one = w.const(np.array(1.0, w.dtype))
    if how == "global":
        factor = w.op("Min", 0.1 / (total_norm(w, list(found.values())) + 1e-6), one)
        return {name: g * factor for name, g in found.items()}
    if how == "own":
        return {name: g * w.op("Min", 0.1 / ((g * g).sum().sqrt() + 1e-6), one) for name, g in found.items()}
    if how == "value":
        low, high = w.const(np.array(-0.05, w.dtype)), w.const(np.array(0.05, w.dtype))
        return {name: w.op("Clip", g, low, high) for name, g in found.items()}
    if how == "infinity":
        tops = [w.op("ReduceMax", w.op("Abs", g), keepdims=0) for g in found.values()]
        top = w.op("Max", *tops) if len(tops) > 1 else tops[0]
        return {name: g / w.op("Max", top * 10.0, one) for name, g in found.items()}
    if how == "mean":
        total = None
        for g in found.values():
            part = w.op("Abs", g).mean()
            total = part if total is None else total + part
        return {name: g / (total + 1.0) for name, g in found.items()}
    return found


def schedule(w: Writer, rate: Value) -> tuple[Value, Shared]:
    how = w.pick("none", "none", "warm", "cosine", "table", "powers", "if", "decay")
    shared = Shared(rate)
    if how == "none":
        return rate, shared
    if how == "powers":
        powers = []
        for name, beta in (("p1", 0.9), ("p2", 0.99)):
            state = w.state(name, np.array(1.0, w.dtype))
            new = state * beta
            w.becomes(state, new)
            powers.append(1.0 - new)
        shared.powers = (powers[0], powers[1])
        return rate, shared
    if how == "decay":
        state = w.state("rate", np.array(1.0, w.dtype))
        w.becomes(state, state * 0.9)
        return rate * state, shared
    kind = w.pick(np.int64, np.int32, w.dtype)
    shape = w.pick((), (1,))
    count = w.state("step", np.zeros(shape, kind))
    new = count + 1
    w.becomes(count, new)
    t = new.to(w.dtype).reshape(*shape)
    if how == "warm":
        factor = w.op("Min", t / 4.0, w.like(1.0, t))
    elif how == "cosine":
        factor = (w.op("Cos", t * 0.3) + 1.0) * 0.5
    elif how == "table":
        at = w.op("Min", new.to(np.int64), w.const(np.array(3)))
        factor = w.op("Gather", w.const(np.array([0.1, 0.5, 1.0, 0.7], w.dtype)), at, axis=0)
    else:
        early = w.op("Less", new.to(w.dtype), w.like(2.0, t))
        factor = w.op("Where", early, w.like(0.5, t), w.like(1.0, t))
    if shape == (1,) and w.pick(True, False):
        factor = w.op("Squeeze", factor)
    return rate * factor, shared


__all__ = ["written"]
