"""Activations and the gradients: elementwise, and softmax along an axis.

Formulas: derivatives of the functions as ONNX and ONNX Runtime document them; dY is the gradient of the result.
"""

from __future__ import annotations

import math

from gopt.importers.artifacts.lowering.builder import Builder

_TANH = (math.sqrt(2 / math.pi), 0.044715)
"""Constants of the approximation of GELU by tanh."""


def relu_grad(b: Builder, dy: str, y: str) -> str:
    """dY where the result is above 0."""
    zero = b.number_like(0, y)
    return b.op("Where", b.op("Greater", y, zero), dy, zero)


def leaky_relu_grad(b: Builder, dy: str, y: str, *, alpha: float) -> str:
    return b.op("Where", b.op("Greater", y, b.number_like(0, y)), dy, b.op("Mul", dy, b.number_like(alpha, y)))


def sigmoid_grad(b: Builder, dy: str, y: str) -> str:
    """dY · Y · (1 - Y)."""
    return b.op("Mul", dy, b.op("Mul", y, b.op("Sub", b.number_like(1, y), y)))


def tanh_grad(b: Builder, dy: str, y: str) -> str:
    """dY · (1 - Y²)."""
    return b.op("Mul", dy, b.op("Sub", b.number_like(1, y), b.op("Mul", y, y)))


def gelu(b: Builder, x: str) -> str:
    """X · Φ(X), Φ the normal distribution."""
    return b.op("Mul", x, _normal(b, x, x))


def _normal(b: Builder, x: str, like: str) -> str:
    wide = b.op("Add", b.number_like(1, like), b.op("Erf", b.op("Mul", x, b.number_like(math.sqrt(0.5), like))))
    return b.op("Mul", b.number_like(0.5, like), wide)


def gelu_grad(b: Builder, dy: str, x: str) -> str:
    """dY · (Φ(X) + X · φ(X)), φ the density of Φ."""
    return _gelu_grad(b, dy, x, x)


def _gelu_grad(b: Builder, dy: str, x: str, like: str) -> str:
    bell = b.op("Exp", b.op("Mul", b.op("Mul", x, x), b.number_like(-0.5, like)))
    density = b.op("Mul", bell, b.number_like(1 / math.sqrt(2 * math.pi), like))
    return b.op("Mul", dy, b.op("Add", _normal(b, x, like), b.op("Mul", x, density)))


def bias_gelu(b: Builder, x: str, bias: str) -> str:
    moved = b.op("Add", x, bias)
    return b.op("Mul", moved, _normal(b, moved, x))


def bias_gelu_grad(b: Builder, dy: str, x: str, bias: str) -> str:
    """The gradient of X alone: its sum, another operator, is the gradient of the bias."""
    return _gelu_grad(b, dy, b.op("Add", x, bias), x)


def fast_gelu(b: Builder, x: str, bias: str = "") -> str:
    """X · (1 + tanh(√(2/π) · (X + 0.044715 · X³))) / 2."""
    moved = b.op("Add", x, bias) if bias else x
    half = b.op("Mul", moved, b.number_like(0.5, x))
    return b.op("Mul", half, b.op("Add", b.number_like(1, x), b.op("Tanh", _inner(b, moved, x))))


def _inner(b: Builder, x: str, like: str) -> str:
    scale, cubic = _TANH
    cube = b.op("Mul", b.op("Mul", b.op("Mul", x, x), x), b.number_like(cubic, like))
    return b.op("Mul", b.op("Add", x, cube), b.number_like(scale, like))


def fast_gelu_grad(b: Builder, dy: str, x: str) -> str:
    """The derivative of ``fast_gelu``: (1 + t) / 2 + X / 2 · (1 - t²) · √(2/π) · (1 + 3 · 0.044715 · X²)."""
    return _fast_gelu_grad(b, dy, x, x)


def _fast_gelu_grad(b: Builder, dy: str, x: str, like: str) -> str:
    scale, cubic = _TANH
    one, half = b.number_like(1, like), b.number_like(0.5, like)
    t = b.op("Tanh", _inner(b, x, like))
    slope = b.op("Add", one, b.op("Mul", b.op("Mul", x, x), b.number_like(3 * cubic, like)))
    slope = b.op("Mul", slope, b.number_like(scale, like))
    bend = b.op("Mul", b.op("Mul", b.op("Mul", x, half), b.op("Sub", one, b.op("Mul", t, t))), slope)
    return b.op("Mul", dy, b.op("Add", b.op("Mul", half, b.op("Add", one, t)), bend))


def bias_fast_gelu_grad(b: Builder, dy: str, x: str, bias: str) -> str:
    return _fast_gelu_grad(b, dy, b.op("Add", x, bias), x)


def quick_gelu(b: Builder, x: str, *, alpha: float) -> str:
    """X · sigmoid(alpha · X)."""
    return b.op("Mul", x, b.op("Sigmoid", b.op("Mul", x, b.number_like(alpha, x))))


def quick_gelu_grad(b: Builder, dy: str, x: str, *, alpha: float) -> str:
    """dY · s · (1 + alpha · X · (1 - s)), s = sigmoid(alpha · X)."""
    one, scaled = b.number_like(1, x), b.op("Mul", x, b.number_like(alpha, x))
    s = b.op("Sigmoid", scaled)
    slope = b.op("Add", one, b.op("Mul", scaled, b.op("Sub", one, s)))
    return b.op("Mul", dy, b.op("Mul", s, slope))


def softmax_grad_13(b: Builder, dy: str, y: str, *, axis: int) -> str:
    """(dY - Σ dY · Y) · Y, the sum along ``axis``."""
    return _softmax_grad(b, dy, y, [axis])


def softmax_grad(b: Builder, dy: str, y: str, *, axis: int) -> str:
    """The same, the sum over all axes from ``axis`` on, as operator set 11 has it."""
    return _softmax_grad(b, dy, y, _from(b, y, axis))


def _softmax_grad(b: Builder, dy: str, y: str, axes: list[int]) -> str:
    total = b.reduce("ReduceSum", b.op("Mul", dy, y), axes)
    return b.op("Mul", b.op("Sub", dy, total), y)


def log_softmax_grad_13(b: Builder, dy: str, y: str, *, axis: int) -> str:
    """dY - exp(Y) · Σ dY, the sum along ``axis``."""
    return _log_softmax_grad(b, dy, y, [axis])


def log_softmax_grad(b: Builder, dy: str, y: str, *, axis: int) -> str:
    """The same, the sum over all axes from ``axis`` on, as operator set 11 has it."""
    return _log_softmax_grad(b, dy, y, _from(b, y, axis))


def _log_softmax_grad(b: Builder, dy: str, y: str, axes: list[int]) -> str:
    return b.op("Sub", dy, b.op("Mul", b.op("Exp", y), b.reduce("ReduceSum", dy, axes)))


def _from(b: Builder, y: str, axis: int) -> list[int]:
    return list(range(axis % b.rank(y), b.rank(y)))
