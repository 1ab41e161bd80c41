"""Losses with several constants, some of which equal the number of samples by chance."""

from __future__ import annotations

from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter
from whole_gen.kinds import kind
from whole_gen.writer import Writer


@kind
def distilled(w: Writer) -> None:
    """A student follows a teacher's softened choices, times the square of the temperature, beside the labels: the
    temperature, the number of classes, and weights of both terms may each equal the number of samples or its share."""
    w.options["accumulate"] = 1
    size, classes = w.pick(3, 4), w.pick(3, 4)
    x, t = w.fed("x", [size]), w.fed("t", [classes])
    hot = w.fed("hot", [classes], lambda generator, s: generator.dirichlet([1.0] * s[1], s[0]))
    w0, w1 = parameter(w, "w0", size, 4), parameter(w, "w1", 4, classes)
    heat, weight = w.pick(2.0, 4.0, 3.0), w.pick(0.5, 0.25, 0.3)
    h = w.op("Tanh", x @ w0)
    z = h @ w1
    soft = w.op("LogSoftmax", z / heat, axis=1)
    aim = w.op("Softmax", t / heat, axis=1)
    mean = w.pick("mean", "sum over samples", "written")
    kl = (aim * (w.op("Log", aim) - soft)).sum(1)
    own = -(hot * w.op("LogSoftmax", z, axis=1)).sum(1)
    if mean == "mean":
        kl, own = kl.mean(), own.mean()
    elif mean == "sum over samples":
        kl, own = kl.sum(), own.sum()
    else:
        kl, own = kl.sum() / float(w.samples), own.sum() / float(w.samples)
    loss = kl * (heat * heat * weight) + own * (1.0 - weight)
    w.out("loss", loss)
    if w.pick("derived", "by hand") == "derived":
        found = gradients(loss, [w0, w1])
    else:
        n = 1.0 if mean == "sum over samples" else float(w.samples)
        apart = w.op("Softmax", z / heat, axis=1) - aim
        far = apart * (heat * weight / n) if w.pick(True, False) else apart * heat * weight / n
        near = w.op("Softmax", z, axis=1) - hot
        near = near * ((1.0 - weight) / n) if w.pick(True, False) else near / n * (1.0 - weight)
        d = far + near
        found = [x.turn(1, 0) @ (d @ w1.turn(1, 0) * (1.0 - h * h)), h.turn(1, 0) @ d]
    for each, g in zip((w0, w1), found):
        w.gradients[each.name] = g
        w.becomes(each, each - g * w.pick(0.1, 0.25))
