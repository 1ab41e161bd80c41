"""Batches whose number of samples the file leaves open: it is read from shapes, in many forms, and may be shared."""

from __future__ import annotations

import numpy as np
from onnx import numpy_helper

from whole_gen.forwards import ids, parameter
from whole_gen.kinds import kind
from whole_gen.writer import Value, Writer


def _whole(w: Writer, number: int) -> Value:
    return w.const(np.array(number))


def _ones(w: Writer, x: Value) -> Value:
    fill = numpy_helper.from_array(np.ones(1, w.dtype))
    shape = w.op("Shape", x, start=0, end=1)
    if w.pick(True, False):
        return w.op("ConstantOfShape", shape, value=fill)
    return w.op("Expand", w.const(np.ones(1, w.dtype), "stored"), shape)


SIZES = {
    "gathered": lambda w, x: w.op("Gather", w.op("Shape", x), _whole(w, 0), axis=0).to(w.dtype),
    "squeezed": lambda w, x: w.op("Squeeze", w.op("Shape", x, start=0, end=1)).to(w.dtype),
    "whole": lambda w, x: w.op("Size", x).to(w.dtype) / float(x.shape[1]),
    "product": lambda w, x: w.op("ReduceProd", w.op("Shape", x), keepdims=0).to(w.dtype) / float(x.shape[1]),
    "multiplied": lambda w, x: (
        w.op("Gather", w.op("Shape", x), _whole(w, 0)) * w.op("Gather", w.op("Shape", x), _whole(w, 1))
    ).to(w.dtype) / float(x.shape[1]),
    "ones": lambda w, x: w.op("ReduceSum", _ones(w, x), keepdims=0),
    "table of ones": lambda w, x: w.op("ReduceSum", w.op("Expand", w.const(np.ones((1, 1), w.dtype)), w.op("Shape", x)),
                                       keepdims=0) / float(x.shape[1]),
    "last place": lambda w, x: (w.op("ReduceMax", w.op("Range", _whole(w, 0), w.op("Size", x), _whole(w, 1)),
                                     keepdims=0).to(w.dtype) + 1.0) / float(x.shape[1]),
    "at least one": lambda w, x: w.op("Max", w.op("Size", x).to(w.dtype) / float(x.shape[1]),
                                      w.const(np.array(1, w.dtype))),
}  # fmt: skip
"""Forms in which the number of samples is read."""
DIVIDED = {
    "in front": lambda w, x, n: (x / n).sum(0),
    "times one over it": lambda w, x, n: (x * (1.0 / n)).sum(0),
    "behind": lambda w, x, n: x.sum(0) / n,
    "twice": lambda w, x, n: ((x * 0.5) / n * 2.0).sum(0),
    "product": lambda w, x, n: w.op("Einsum", x, x / n, equation="ni,ni->i"),
    "chosen": lambda w, x, n: w.op("Where", x_above(w, x), x / n, w.const(np.array(0, w.dtype))).sum(0),
    "root": lambda w, x, n: (x / n.sqrt() * (x / n.sqrt())).sum(0),
    "exponential": lambda w, x, n: w.op("Exp", x / n).sum(0),
    "absolute": lambda w, x, n: w.op("Abs", x / n).sum(0),
    "mean again": lambda w, x, n: (x / n).mean(0),
    "square": lambda w, x, n: (x / n * (x / n)).sum(0),
}
"""How a statistic is divided by it."""
UNCLEAR = ("root", "exponential", "absolute", "mean again", "square")


def x_above(w: Writer, x: Value) -> Value:
    return w.op("Greater", x, w.const(np.array(0, w.dtype)))


@kind
def open_samples(w: Writer) -> None:
    """The number of samples divides gradients, also behind sums of clipped samples, and a statistic beside them."""
    w.open = True
    w.options["accumulate"] = 1
    x, y = w.fed("x", [3]), w.fed("y", [], ids(4))
    w0, s = parameter(w, "w0", 3, 4), w.state("s", w.draw("s", (3,), 0.5, 1.5))
    read = x / ((s * s) + 0.7)
    hot = w.op("OneHot", y, _whole(w, 4), w.const(np.float32([0, 1])), axis=-1).to(w.dtype)
    out = read @ w0
    loss = -(hot * w.op("LogSoftmax", out, axis=-1)).sum(-1).mean()
    d = w.op("Softmax", out, axis=-1) - hot
    size = SIZES[w.pick(*SIZES)]
    n = size(w, x)
    how = w.pick("divided", "behind", "bounded")
    if how == "divided":
        g = read.turn(1, 0) @ (d / n)
    elif how == "behind":
        g = (read.turn(1, 0) @ d) / n
    else:
        each = w.op("Einsum", read, d, equation="ni,nj->nij")
        far = (each * each).sum(1, 2, keep=True).sqrt()
        g = (each * w.op("Min", w.const(np.array(1, w.dtype)), 0.4 / (far + 1e-6))).sum(0) / n
    w.gradients["w0"] = g
    w.out("loss", loss)
    m = w.state("w0.m", w.draw("w0.m", w0.shape))
    held = m * 0.9 + g
    w.becomes(m, held)
    w.becomes(w0, w0 - held * 0.1)
    shared = w.pick(True, False)
    way = w.pick(*DIVIDED)
    if way in UNCLEAR:
        w.refusal = "is no sum, mean or extreme over samples"
    w.becomes(s, s * 0.9 + DIVIDED[way](w, x, n if shared else size(w, x)) * 0.1)


def _product(w: Writer, d: Value, weight: Value) -> Value:
    """An adjoint times the transpose of a weight."""
    how = w.pick("MatMul", "Gemm", "Einsum")
    if how == "MatMul":
        return d @ weight.turn(1, 0)
    return w.op("Gemm", d, weight, transB=1) if how == "Gemm" else w.op("Einsum", d, weight, equation="no,io->ni")


@kind
def open_adjoints(w: Writer) -> None:
    """Adjoints of two losses meet, each divided by the number of samples; a product of three has weights of samples."""
    w.open = True
    x, y, z, u = w.fed("x", [3]), w.fed("y", [2]), w.fed("z", [1]), w.fed("u", [])
    w0, a, c = parameter(w, "w0", 3, 4), parameter(w, "a", 4, 2), parameter(w, "c", 4, 1)
    h = w.op("Tanh", x @ w0)
    p, q, size = h @ a, h @ c, SIZES[w.pick(*SIZES)]
    wide = u.reshape(-1, 1)
    first = (((p - y) * (p - y)).mean(-1) * u).mean() + (p * p).mean(-1).mean() * 0.01
    second, much = ((q - z) * (q - z)).mean(), w.pick(0.3, 0.02)
    n, m = size(w, x), size(w, x)
    d, e = (p - y) / n, (q - z) * (2.0 * much) / m
    small = p * 0.01 / m
    if w.pick(True, False):
        ga = w.op("Einsum", h, u, d, equation="ni,n,no->io") + h.turn(1, 0) @ small
        dh = _product(w, d * wide + small, a)
    else:
        both = d * wide + small
        ga, dh = h.turn(1, 0) @ both, _product(w, both, a)
    dh = (dh + _product(w, e, c)) * (1.0 - h * h)
    w.out("first", first)
    w.out("second", second * much if w.pick(True, False) else second)
    for each, g in ((w0, x.turn(1, 0) @ dh), (a, ga), (c, h.turn(1, 0) @ e)):
        w.gradients[each.name] = g
        w.becomes(each, each - g * 0.1)


@kind
def open_critic(w: Writer) -> None:
    """A critic without hidden values: its derivative is one over the number of samples, and meets a penalty that no
    sample enters."""
    w.open = True
    x, z = w.fed("x", [3]), w.fed("z", [2])
    made, critic = parameter(w, "made", 2, 3), parameter(w, "critic", 3, 1)
    fake, n = z @ made, SIZES[w.pick(*SIZES)](w, x)
    far = (critic * critic).sum().sqrt()
    w.out("critic_loss", (fake @ critic).mean() - (x @ critic).mean() + (far - 1.0) * (far - 1.0) * 10.0)
    w.out("made_loss", -(fake @ critic).mean())
    shape = w.op("Concat", w.op("Shape", x, start=0, end=1), w.const(np.array([1])), axis=0)
    each = w.op("Expand", w.const(np.ones((1, 1), w.dtype)), shape) / n
    for name, g in (
        ("critic", fake.turn(1, 0) @ each - x.turn(1, 0) @ each + critic / far * (far - 1.0) * 20.0),
        ("made", z.turn(1, 0) @ _product(w, -each, critic)),
    ):
        w.gradients[name] = g
        old = made if name == "made" else critic
        w.becomes(old, old - g * 0.01)


@kind
def open_tokens(w: Writer) -> None:
    """Tokens are joined with the samples, in one dimension, and taken apart again; the mean is over all of them."""
    w.open = True
    many = w.pick(2, 5)
    x, y = w.fed("x", [many, 3]), w.fed("y", [many, 2])
    w0, a = parameter(w, "w0", 3, 4), parameter(w, "a", 4, 2)
    rows = x.reshape(-1, 3)
    h = w.op("Tanh", rows @ w0)
    apart = w.pick(True, False)
    p = (h @ a).reshape(-1, many, 2) if apart else h @ a
    e = p - (y if apart else y.reshape(-1, 2))
    w.out("loss", (e * e).mean())
    if w.pick(True, False):
        n = w.op("Gather", w.op("Shape", rows), _whole(w, 0)).to(w.dtype)
    else:
        n = w.op("Size", e).to(w.dtype) / 2.0
    d = (e / n).reshape(-1, 2)
    dh = _product(w, d, a) * (1.0 - h * h)
    for each, g in ((w0, rows.turn(1, 0) @ dh), (a, h.turn(1, 0) @ d)):
        w.gradients[each.name] = g
        w.becomes(each, each - g * 0.1)
