"""Backwards that take values of the forward for constants, or pass straight through steps, where samples meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whole_gen.derivatives import detached, gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Record, Value, Writer


def straight(w: Writer, made: Value, value: Value) -> Value:
    """What was made of ``value`` by a step, as if it were that value."""
    w.tape.pop()
    w.tape.append(Record("Identity", [value], [made], {}))
    return made


def drop_identities(w: Writer) -> None:
    """Let readers read what Identities copy, as exporters do."""
    if not w.pick(True, False):
        return
    shown = {each.name for each in w.outputs.values()}
    copies = {node.output[0]: node.input[0] for node in w.nodes if node.op_type == "Identity"}
    for node in w.nodes:
        for place, name in enumerate(node.input):
            while name in copies and name not in shown:
                name = copies[name]
            node.input[place] = name
    w.nodes = [node for node in w.nodes if node.op_type != "Identity" or node.output[0] in shown]


def _bound(w: Writer, value: Value, low: float, high: float) -> Value:
    """Within bounds, in one of the ways to write it."""
    if w.pick("clip", "minmax") == "clip":
        return w.op("Clip", value, w.like(low, value), w.like(high, value))
    return w.op("Max", w.op("Min", value, w.like(high, value)), w.like(low, value))


def _normalised(w: Writer, a: Value, kept: Callable[[Value], Value]) -> Value:
    """Of a batch; ``kept``: what is done to its mean and variance before they are read."""
    mean = a.mean(0, keep=True)
    off = a - kept(mean)
    variance = kept((off * off).mean(0, keep=True))
    return off / (variance + 1e-2).sqrt()


def _kept(w: Writer) -> Callable[[Value], Value]:
    """What is done to statistics before they are read."""
    return (lambda value: value) if w.pick(True, False) else lambda value: detached(w, value)


def _finish(w: Writer, p: list[Value], out: Value, y: Value) -> None:
    d = out - y
    loss = (d * d).mean()
    w.options |= {"accumulate": 1, "statistics": "sync"}
    w.refusal = r"--statistics sync"
    found = gradients(loss, p)
    w.out("loss", loss)
    for each, g in zip(p, found):
        w.becomes(each, each - g * 0.1)
    drop_identities(w)


@kind
def renormalised(w: Writer) -> None:
    """Batch renorm: what turns a batch's statistics into running ones is a constant to the backward."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    kept = w.state("mean", w.draw("mean", (4,), -0.1, 0.1))
    scale = w.state("scale", w.draw("scale", (4,), 0.8, 1.2))
    a = w.op("Tanh", x @ w0) if w.pick(True, False) else x @ w0
    mean = a.mean(0, keep=True)
    off = a - mean
    deviation = ((off * off).mean(0, keep=True) + 1e-2).sqrt()
    r = _bound(w, detached(w, deviation) / scale, 0.4, 2.5)
    d = _bound(w, (detached(w, mean) - kept) / scale, -1.0, 1.0)
    if w.pick(True, False):
        r, d = detached(w, r), detached(w, d)
    h = off / deviation * r + d
    h = w.op("Sigmoid", h) if w.pick(True, False) else h
    w.becomes(kept, kept * 0.9 + mean.reshape(4) * 0.1)
    w.becomes(scale, scale * 0.9 + deviation.reshape(4) * 0.1)
    _finish(w, [w0, w1], h @ w1, y)


@kind
def statistics_held(w: Writer) -> None:
    """Means, variances or largest values of the batch are constants to the backward."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    h = w.op("Tanh", _normalised(w, x @ w0, _kept(w)))
    how = w.pick("mean", "square", "centre", "both")
    if how in ("mean", "both"):
        h = h - detached(w, h.mean(0, keep=True)) * 0.5
    if how in ("square", "both"):
        h = h / (detached(w, (h * h).mean(0, keep=True)) + 0.1)
    if how == "centre":
        middle = h.mean(0, keep=True)
        h = h + detached(w, middle * middle)
    _finish(w, [w0, w1], h @ w1, y)


@kind
def twins(w: Writer) -> None:
    """One view predicts another, whose features are a constant to the backward, behind a normalisation of the batch."""
    x, other = w.fed("x", [3]), w.fed("other", [3])
    w0, w1 = parameter(w, "w0", 3, 3), parameter(w, "w1", 3, 3)
    one = w.op("Tanh", _normalised(w, x @ w0, lambda value: value))
    two = w.op("Tanh", _normalised(w, other @ w0, lambda value: value))
    target = detached(w, two)
    if w.pick(True, False):
        _finish(w, [w0, w1], one @ w1, target)
        return
    here, there = one @ w1 - target, two @ w1 - detached(w, one)
    _finish(w, [w0, w1], here * here, -(there * there))


@kind
def quantised_within(w: Writer) -> None:
    """Hidden values, normalised over the batch, are rounded; the gradient passes straight through."""
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    h = _normalised(w, x @ w0, _kept(w))
    how = w.pick("round", "floor", "integer", "clipped", "sign", "codes", "difference")
    scaled = h * 4.0
    if how == "round":
        q = straight(w, w.op("Round", scaled), scaled) / 4.0
    elif how == "floor":
        q = straight(w, w.op("Floor", scaled), scaled) / 4.0
    elif how == "integer":
        narrow = w.op("Cast", scaled, to=6)
        w.tape.pop()
        q = straight(w, narrow.to(w.dtype), scaled) / 4.0
    elif how == "clipped":
        clipped = _past_bounds(w, scaled)
        q = straight(w, w.op("Round", clipped), clipped) / 4.0
    elif how == "sign":
        q = straight(w, w.op("Sign", h), h)
    elif how == "codes":
        hot = w.op("Greater", h, w.like(0.0, h)).to(w.dtype)
        w.tape.pop()
        q = h + detached(w, hot * 2.0 - 1.0 - h)
    else:
        q = h + detached(w, w.op("Round", scaled) / 4.0 - h)
    _finish(w, [w0, w1], q @ w1, y)


def _past_bounds(w: Writer, value: Value) -> Value:
    """A clip, with its own derivative or passed straight through."""
    made = w.op("Clip", value, w.like(-3.0, value), w.like(3.0, value))
    if w.pick(True, False):
        return straight(w, made, value)
    w.tape.pop()
    inside = w.op("LessOrEqual", w.op("Abs", value), w.const(np.array(3.0, w.dtype)))
    w.tape[-2:] = [Record("Where", [inside, value, w.like(0.0, value)], [made], {})]
    return made
