"""What a statistic takes of the batch in other forms than one reduction: places, histories, activations, weights."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Value, Writer


def _trained(w: Writer, p: list[Value], loss: Value) -> None:
    w.out("loss", loss)
    for each, g in zip(p, gradients(loss, p)):
        w.becomes(each, each - g * 0.1)


def _plain(w: Writer, seen: Value, y: Value, w0: Value) -> None:
    d = seen @ w0 - y
    _trained(w, [w0], (d * d).mean())


@kind
def placed_sums(w: Writer) -> None:
    """Samples are added to rows that they name, or bound them: counts of classes, sums of features, largest values."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    c = w.fed("c", [], lambda generator, size: generator.integers(0, 5, size))
    w0 = parameter(w, "w0", 3, 2)
    what, op = w.pick("ones", "ones", "values", "largest", "direct", "features"), w.pick("ScatterND", "ScatterElements")
    whole = what == "direct" and w.pick(True, False)
    n = w.state("n", np.arange(3, 8) if whole else w.draw("n", (5,), 3.0, 9.0))
    w.told = True
    scale = w.op("Gather", 1.0 / (n.to(w.dtype) if whole else n), c, axis=0).reshape(-1, 1)
    one = w.op("Expand", w.const(np.ones(1, n.held.dtype)), w.op("Shape", c))
    one = w.const(np.ones(w.samples, n.held.dtype)) if w.pick(True, False) else one
    given = one if what == "ones" else w.reduced("ReduceMax", w.op("Abs", x), [1], False)
    places = c.reshape(-1, 1) if op == "ScatterND" else c
    more = {} if op == "ScatterND" else {"axis": 0}
    if what == "largest":
        new = w.op(op, n * 0.9, places, given, reduction="max", **more)
    elif what in ("direct", "features"):
        new = w.op(op, n, places, one if what == "direct" else given, reduction="add", **more)
        w.refusal = "let it add them to zeros" if what == "features" else ""
    else:
        zeros = w.const(np.zeros(5, w.dtype), "stored")
        new = n * 0.9 + w.op(op, zeros, places, given, reduction="add", **more) * w.pick(1.0, 0.1)
    w.becomes(n, new)
    _plain(w, x * scale, y, w0)


@kind
def history_of_extremes(w: Writer) -> None:
    """A short history of extremes or sums, written at the step modulo its length, which may be the size of a batch."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, size = parameter(w, "w0", 3, 2), w.pick(4, 5)
    h, step = w.state("history", w.draw("history", (size,), 1.0, 2.0)), w.state("step", np.array(3, np.int64))
    w.told = True
    scale = 7.0 / w.reduced("ReduceMax", h, [0], False)
    what, how = w.pick("amax", "sum"), w.pick("scatter", "where", "roll")
    top = w.reduced("ReduceMax", w.op("Abs", x), [], False) if what == "amax" else (x * x).sum()
    at = w.op("Mod", step, w.const(np.array(size)))
    if how == "scatter":
        new = w.op("ScatterND", h, at.reshape(1, 1), top.reshape(1))
    elif how == "where":
        new = w.op("Where", w.op("Equal", w.const(np.arange(size), "stored"), at), top, h)
    else:
        rest = w.op("Slice", h, w.const(np.array([1])), w.const(np.array([size])))
        new = w.op("Concat", rest, top.reshape(1), axis=0)
    w.becomes(h, new)
    w.becomes(step, w.op("Add", step, w.const(np.array(1))))
    _plain(w, x * scale, y, w0)


@kind
def kept_activation(w: Writer) -> None:
    """A loss that keeps activations near their running mean: all that its derivative reads is behind the mean, too."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, m = parameter(w, "w0", 3, 2), w.state("m", w.draw("m", (2,), 0.2, 0.9))
    h = w.op("Tanh", x @ w0)
    d, off = h - y, h - m
    loss = w.pick("mean", "sum")
    if loss == "sum":
        w.options["loss_reduction"] = "sum"
        _trained(w, [w0], (d * d).sum() + (off * off).sum() * 0.1)
    else:
        _trained(w, [w0], (d * d).mean() + (off * off).mean() * 0.1)
    taken = h.mean(0)
    w.becomes(m, m * 0.9 + taken * 0.1 if w.pick(True, False) else m + (taken - m) * 0.1)


@kind
def scale_made_anew(w: Writer) -> None:
    """A stored scale that each step makes of its batch alone: the names say that it is one."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, shape = parameter(w, "w0", 3, 2), w.pick((), (3,))
    s = w.state("scale", w.draw("scale", shape, 0.5, 1.5))
    top = w.reduced("ReduceMax", w.op("Abs", x), [0] if shape else [], False)
    w.becomes(s, 7.0 / top if w.pick(True, False) else top + 0.01)
    _plain(w, x * s, y, w0)


@kind
def weighed_statistic(w: Writer) -> None:
    """Weights of samples that a running mean reads, and the loss does not."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    k = w.fed("k", w.pick([], [1]), lambda generator, size: generator.uniform(0.5, 1.5, size))
    w0, m = parameter(w, "w0", 3, 2), w.state("m", w.draw("m", (3,), 0.2, 0.9))
    weighed = x * (k.reshape(-1, 1) if len(k.shape) == 1 else k)
    new = weighed.sum(0) / k.sum() if w.pick(True, False) else weighed.mean(0)
    w.becomes(m, m * 0.9 + new * 0.1)
    _plain(w, x - m, y, w0)


@kind
def stated_number(w: Writer) -> None:
    """A constant that the user says counts samples stands behind other statistics, too."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, m = parameter(w, "w0", 3, 2), w.state("m", w.draw("m", (3,), 0.2, 0.9))
    seen, v = w.state("seen", w.draw("seen", (), 9.0, 20.0)), w.state("v", w.draw("v", (3,), 0.5, 1.5))
    w.told = True
    w.stated["seen"] = "sum"
    many = w.const(np.array(float(w.samples), w.dtype), w.pick("stored", "node"))
    total, off = seen + many, x.mean(0) - m
    w.becomes(seen, total)
    w.becomes(m, m + off * many / total if w.pick(True, False) else (m * seen + x.mean(0) * many) / total)
    own = (x * x).mean(0) - x.mean(0) * x.mean(0)
    w.becomes(v, (v * seen + own * many + off * off * seen * many / total) / total)
    _plain(w, (x - m) / (v * v + 0.5), y, w0)
