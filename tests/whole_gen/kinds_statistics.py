"""Statistics that look like something else: a scalar beside the loss, rows of a table."""

from __future__ import annotations

import numpy as np

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Value, Writer


def _one(w: Writer, value: Value, what: str) -> Value:
    """One number of all samples."""
    if what == "max":
        return w.reduced("ReduceMax", w.op("Abs", value), [], False)
    if what == "min":
        return w.reduced("ReduceMin", value, [], False)
    return (value * value).mean() if what == "square" else value.mean()


@kind
def running_scalar(w: Writer) -> None:
    """One number follows hidden values; it lies nearer to the inputs than the loss, and depends on parameters as it
    does. Forward, update or nothing reads it."""
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, 2)
    what, use = w.pick("mean", "square", "max", "min"), w.pick("forward", "update", "before", "nothing")
    s = w.state("top", w.draw("top", (), 0.5, 1.5))
    a = x @ w0
    h = w.op("Tanh", a)
    seen = _one(w, a if w.pick(True, False) else h, what)
    rate = w.pick(0.1, 0.03)
    way = w.pick("average", "step", "extreme" if what in ("max", "min") else "average")
    if way == "average":
        new = s * (1 - rate) + seen * rate
    elif way == "step":
        new = s + (seen - s) * rate
    else:
        new = w.op("Max" if what == "max" else "Min", s * 0.9, seen)
    out = (h / (s * s + 0.5) if use == "forward" else h) @ w1
    d = out - y
    loss = (d * d).mean() if w.pick("square", "square", "linear") == "square" else out.mean()
    found = gradients(loss, [w0, w1])
    early = w.pick(True, False)
    if early:
        w.becomes(s, new)
    w.out("loss", loss)
    if use == "update":
        w.refusal = "a value of one rank's own batch, beside a gradient"
    read = new if use == "update" else s
    held = w.op("Sqrt", w.op("Min", 0.5 / (read * read + 0.25), w.like(1.0, s)))
    for each, g in zip([w0, w1], found):
        moved = each - g * 0.1
        w.becomes(each, moved * held if use in ("update", "before") else moved)
    if not early:
        w.becomes(s, new)


@kind
def rows_written(w: Writer) -> None:
    """The forward writes rows of a table by the batch before it reads them, and the update starts from what it wrote;
    or it bounds all rows, which follows no batch."""
    ids = w.fed("ids", [], lambda generator, size: generator.integers(0, 6, size))
    y = w.fed("y", [3])
    table = w.state("table", w.draw("table", (6, 3)))
    w.told = True
    how = w.pick("set", "bounded", "all")
    if how == "set":
        rows = w.op("Gather", table, ids)
        there = ids.reshape(-1, 1)
        written = w.op("ScatterND", table, there, rows / ((rows * rows).sum(1, keep=True) + 0.1).sqrt())
    else:
        norm = (table * table).sum(1, keep=True).sqrt()
        over = w.op("Min", 0.4 / norm, w.like(1.0, norm))
        if how == "bounded":
            hit = w.op("Equal", ids.reshape(-1, 1), w.const(np.arange(6)[None])).to(w.dtype)
            seen = w.reduced("ReduceMax", hit, [0], False).reshape(6, 1)
            over = seen * over + (1.0 - seen)
        written = table * over
    if how != "all":
        w.refusal = "'table'"
    w.tape.clear()  # the gradient is that of what was written
    d = w.op("Gather", written, ids, axis=0) - y
    loss = (d * d).mean()
    (g,) = gradients(loss, [written])
    w.gradients["table"] = w.gradients.pop(written.name)
    w.out("loss", loss)
    w.becomes(table, written - g * 0.1)
