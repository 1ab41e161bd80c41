"""Derivatives by samples that a step bends before it sums them."""

from __future__ import annotations

import numpy as np

from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Writer

BENT = {
    "bounded": lambda w, d: w.op("Clip", d, w.const(np.array(-0.07, w.dtype)), w.const(np.array(0.05, w.dtype))),
    "curved": lambda w, d: w.op("Tanh", d * 9.0),
    "signs": lambda w, d: w.op("Sign", d),
    "sizes": lambda w, d: w.op("Abs", d) * w.op("Sign", d),
    "rows of length one": lambda w, d: d / (d * d).sum(1, keep=True).sqrt(),
    "rows of about one": lambda w, d: d / ((d * d).sum(1, keep=True).sqrt() + 0.1),
    "rows of at most one": lambda w, d: d / w.op("Max", w.op("ReduceL2", d, w.const(np.array([1])), keepdims=1),
                                              w.const(np.array(0.05, w.dtype))),
    "large ones": lambda w, d: w.op("Where", w.op("Less", w.op("Abs", d), w.const(np.array(0.04, w.dtype))),
                                    w.const(np.array(0, w.dtype)), d),
    "positive ones": lambda w, d: w.op("Where", w.op("Less", d, w.const(np.array(0, w.dtype))), d * 0.3, d),
    "faded": lambda w, d: d * w.op("Exp", -(d * d * 8.0)),
    "shares": lambda w, d: d * w.op("Softmax", d * 9.0, axis=-1),
    "moved": lambda w, d: d + 0.02,
    "roots": lambda w, d: w.op("Sqrt", w.op("Abs", d)) * w.op("Sign", d),
}  # fmt: skip
"""What a step may make of the derivatives by samples before it sums them."""


@kind
def bent_derivatives(w: Writer) -> None:
    """Derivatives by samples are bounded, scaled by rows, or chosen by their size before they are summed: where the
    number of samples, or a count, divides them, ranks of part of the batch make another step."""
    w.open = w.pick(True, False)
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [2])
    w0, a = parameter(w, "w0", 3, 4), parameter(w, "a", 4, 2)
    h = w.op("Tanh", x @ w0)
    e = h @ a - y
    how = w.pick("sum", "mean", "mean", "count")
    if how == "count":
        u = w.fed("u", [1])
        seen = u * u + 0.1
        count = seen.sum()
        w.out("loss", (e * e * seen).sum() / count)
        d = e * seen * 2.0 / count
    elif how == "mean":
        w.out("loss", (e * e).mean())
        d = e * 2.0 / (w.op("Size", e).to(w.dtype) if w.open or w.pick(True, False) else float(e.held.size))
    else:
        w.out("loss", (e * e).sum())
        d = e * 2.0
    d = BENT[w.pick(*BENT)](w, d)
    dh = d @ a.turn(1, 0) * (1.0 - h * h)
    for each, g in ((w0, x.turn(1, 0) @ dh), (a, h.turn(1, 0) @ d)):
        w.gradients[each.name] = g
        w.becomes(each, each - g * 0.1)
