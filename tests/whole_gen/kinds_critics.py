"""Losses that are linear in what a network makes: their derivative is a constant until it meets the samples."""

from __future__ import annotations

from whole_gen.derivatives import gradients
from whole_gen.forwards import act, parameter
from whole_gen.kinds import kind
from whole_gen.writer import Writer


@kind
def linear_critic(w: Writer) -> None:
    """A critic of two batches by the difference of means; a term of another weight may be added."""
    x, z = w.fed("x", [3]), w.fed("z", [3])
    w0, w1 = parameter(w, "w0", 3, 4), parameter(w, "w1", 4, w.pick(1, 2))
    real, made = act(w, x @ w0) @ w1, act(w, z @ w0) @ w1
    reduced = w.pick("mean", "mean", "sum")
    loss = real.mean() - made.mean() if reduced == "mean" else real.sum() - made.sum()
    more = w.pick("nothing", "square", "square")
    if more == "square":
        term = (real * real).mean() if reduced == "mean" else (real * real).sum()
        w.out("term", term)
        loss = loss + term * w.pick(0.01, 0.3)
    w.out("loss", loss)
    for each, g in zip([w0, w1], gradients(loss, [w0, w1])):
        w.becomes(each, each - g * 0.05)
