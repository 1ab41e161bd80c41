"""Steps whose samples are coupled, with backward and update written out, for any number of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from helpers import Builder
from onnx import ModelProto

Update = Callable[[Builder, str, str, tuple[int, ...]], None]


@dataclass(frozen=True)
class Coupled:
    """A perceptron with a normalisation over the batch in it.

    ``fused``: the backward as PyTorch writes it; else straight through mean and variance. ``sums``: means are sums
    divided by a constant. ``loss``: mean, weighted (by a mask), root (of the mean), balanced (a product of means), or
    one of ``ODD``.
    ``momentum``: an update with a state. ``half``: matrix products in float16. ``layers``: normalisations.
    """

    fused: bool = True
    sums: bool = False
    loss: str = "mean"
    momentum: bool = False
    half: bool = False
    layers: int = 1
    normal: bool = True


def build(kind: Coupled, batch: int) -> ModelProto:
    b = Builder(7)
    widths = [3, *[4] * kind.layers, 2]
    average = _Average(b, batch, kind.sums)
    h = b.input("x", (batch, widths[0]))
    target = b.input("y", (batch, widths[-1]))
    back: list[Callable[[str], str]] = []
    gradients: dict[str, tuple[str, tuple[int, ...]]] = {}
    for place in range(kind.layers):
        h = _linear(b, kind, h, f"w{place}", (widths[place], widths[place + 1]), back, gradients)
        if kind.normal:
            h = _norm(b, kind, h, f"n{place}", widths[place + 1], batch, average, back, gradients)
        h = _tanh(b, h, back)
    out = _linear(b, kind, h, "last", (widths[-2], widths[-1]), back, gradients)
    loss, delta = _loss(b, kind, out, target, batch, widths[-1])
    for each in reversed(back):
        delta = each(delta)
    b.output("loss", loss, ())
    for name, (gradient, shape) in gradients.items():
        step = gradient
        if kind.momentum:
            held = b.small(f"{name}.m", shape)
            step = b.op("Add", b.op("Mul", held, b.const(0.9)), gradient)
            b.output(f"{name}.m_out", step, shape)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", step, b.const(0.1))), shape)
    return b.model()


@dataclass
class _Average:
    """The mean over samples: a ReduceMean, or a ReduceSum and a division by their number."""

    b: Builder
    batch: int
    sums: bool

    def __call__(self, value: str) -> str:
        over = self.b.const([0], "int64")
        if not self.sums:
            return self.b.op("ReduceMean", value, over, keepdims=0)
        return self.b.op("Div", self.b.op("ReduceSum", value, over, keepdims=0), self.b.const(float(self.batch)))


def _total(b: Builder, value: str) -> str:
    return b.op("ReduceSum", value, b.const([0], "int64"), keepdims=0)


def _linear(b, kind, h, name, shape, back, gradients) -> str:
    weight = b.parameter(name, shape)

    def product(left: str, right: str, turn: str = "") -> str:
        if kind.half:
            left, right = (b.op("Cast", each, to=10) for each in (left, right))
        left = b.op("Transpose", left, perm=[1, 0]) if turn == "left" else left
        right = b.op("Transpose", right, perm=[1, 0]) if turn == "right" else right
        made = b.op("MatMul", left, right)
        return b.op("Cast", made, to=1) if kind.half else made

    def backward(delta: str) -> str:
        gradients[name] = (product(h, delta, "left"), shape)
        return product(delta, weight, "right")

    back.append(backward)
    return product(h, weight)


def _tanh(b, h, back) -> str:
    made = b.op("Tanh", h)
    back.append(lambda delta: b.op("Mul", delta, b.op("Sub", b.const(1.0), b.op("Mul", made, made))))
    return made


def _norm(b, kind, z, name, width, batch, average, back, gradients) -> str:
    scale = b.state(f"{name}.scale", np.linspace(0.5, 1.5, width).astype(np.float32))
    shift = b.parameter(f"{name}.shift", (width,))
    mean = average(z)
    centred = b.op("Sub", z, mean)
    variance = average(b.op("Mul", centred, centred))
    inverse = b.op("Reciprocal", b.op("Sqrt", b.op("Add", variance, b.const(1e-3))))
    hat = b.op("Mul", centred, inverse)
    for role, value, positive in (("mean", mean, False), ("variance", variance, True)):
        old = b.small(f"{name}.{role}", (width,))
        if positive:
            value = b.op("Mul", value, b.const(batch / (batch - 1)))
        new = b.op("Add", b.op("Mul", old, b.const(0.9)), b.op("Mul", value, b.const(0.1)))
        b.output(f"{name}.{role}_out", new, (width,))

    def backward(delta: str) -> str:
        to_shift = _total(b, delta)
        gradients[f"{name}.shift"] = (to_shift, (width,))
        count = b.const(1.0 / batch)
        if kind.fused:
            spread = _total(b, b.op("Mul", delta, centred))
            gradients[f"{name}.scale"] = (b.op("Mul", spread, inverse), (width,))
            along = b.op("Mul", b.op("Mul", spread, count), b.op("Mul", inverse, inverse))
            rest = b.op("Sub", delta, b.op("Mul", centred, along))
            rest = b.op("Sub", rest, b.op("Mul", to_shift, count))
            return b.op("Mul", rest, b.op("Mul", inverse, scale))
        gradients[f"{name}.scale"] = (_total(b, b.op("Mul", delta, hat)), (width,))
        to_hat = b.op("Mul", delta, scale)
        to_inverse = _total(b, b.op("Mul", to_hat, centred))
        cube = b.op("Mul", b.op("Mul", inverse, inverse), inverse)
        to_variance = b.op("Mul", b.op("Mul", to_inverse, cube), b.const(-0.5))
        to_square = b.op("Mul", to_variance, count)
        to_centred = b.op("Mul", to_hat, inverse)
        to_centred = b.op("Add", to_centred, b.op("Mul", centred, b.op("Mul", to_square, b.const(2.0))))
        to_mean = b.op("Neg", b.op("Mul", _total(b, to_centred), count))
        return b.op("Add", to_centred, to_mean)

    back.append(backward)
    return b.op("Add", b.op("Mul", hat, scale), shift)


def _loss(b, kind, out, target, batch, width) -> tuple[str, str]:
    """The loss, and what flows back into the network's output."""
    difference = b.op("Sub", out, target)
    if kind.loss == "balanced":
        means = b.op("ReduceMean", b.op("Mul", difference, difference), b.const([0], "int64"), keepdims=0)
        loss = b.op("ReduceSum", b.op("Mul", means, means), keepdims=0)
        factor = b.op("Mul", means, b.const(4.0 / batch))
        return loss, b.op("Mul", difference, factor)
    square = b.op("Mul", difference, difference)
    if kind.loss in ODD:
        return ODD[kind.loss](b, difference, square, batch)
    if kind.loss == "weighted":
        mask = b.input("mask", (batch, 1))
        count = b.op("ReduceSum", mask, keepdims=0)
        loss = b.op("Div", b.op("ReduceSum", b.op("Mul", square, mask), keepdims=0), count)
        return loss, b.op("Mul", b.op("Mul", difference, mask), b.op("Div", b.const(2.0), count))
    loss = b.op("ReduceMean", square, keepdims=0)
    delta = b.op("Mul", difference, b.const(2.0 / (batch * width)))
    if kind.loss == "root":
        loss = b.op("Sqrt", loss)
        delta = b.op("Mul", delta, b.op("Div", b.const(0.5), loss))
    return loss, delta


def _summed(b, difference, square, batch) -> tuple[str, str]:
    return b.op("ReduceSum", square, keepdims=0), b.op("Mul", difference, b.const(2.0))


def _largest(b, difference, square, batch) -> tuple[str, str]:
    """The worst sample."""
    loss = b.op("ReduceMax", square, keepdims=0)
    hit = b.op("Cast", b.op("Equal", square, loss), to=1)
    return loss, b.op("Mul", b.op("Mul", difference, b.const(2.0)), hit)


def _shares(b, difference, square, batch) -> tuple[str, str]:
    """Every sample by its share of a sum over all: the shares shrink as the batch grows."""
    total = b.op("ReduceSum", b.op("Abs", "y"), keepdims=0)
    share = b.op("Div", b.op("Abs", "y"), total)
    each = b.op("Mul", square, share)
    delta = b.op("Mul", b.op("Mul", difference, share), b.const(2.0 / (2 * batch)))
    return b.op("ReduceMean", each, keepdims=0), delta


def _pairs(b, difference, square, batch) -> tuple[str, str]:
    """Products of all pairs of samples."""
    gram = b.op("MatMul", difference, b.op("Transpose", difference, perm=[1, 0]))
    loss = b.op("ReduceMean", gram, keepdims=0)
    ones = b.const(np.full((batch, batch), 2.0 / batch**2))
    return loss, b.op("MatMul", ones, difference)


def _first(b, difference, square, batch) -> tuple[str, str]:
    """The first sample alone."""
    loss = b.op("ReduceMean", b.op("Gather", square, b.const(0, "int64"), axis=0), keepdims=0)
    return loss, b.op("Mul", difference, b.const(np.eye(batch)[:, :1]))


ODD: dict[str, Callable[[Builder, str, str, int], tuple[str, str]]] = {
    "summed": _summed, "largest": _largest, "shares": _shares, "pairs": _pairs, "first": _first,
}  # fmt: skip
"""Losses that no averages over ranks make those of one large batch."""
