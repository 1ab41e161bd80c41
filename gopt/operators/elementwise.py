"""Operators that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from gopt.operators.dims import elements
from gopt.operators.operator import Array, Attributes, Kernel, Operator, Slope, of_operands

NONE, STEP, LINEAR, AFFINE, BENT, CURVED = Slope

_erf = np.vectorize(math.erf, otypes=[np.float64])


def unary(
    name: str, slope: Slope, kernel: Callable[..., Any] | None = None, *, zero: bool = False, **facts: Any
) -> Operator:  # fmt: skip
    """A function of one operand; ``zero``: it is zero at zero."""
    return binary(name, (slope, NONE), kernel, zero=zero or slope is LINEAR, **facts)


def binary(
    name: str, slopes: tuple[Slope, ...], kernel: Callable[..., Any] | None = None, *, zero: bool = False,
    total: bool = True, **facts: Any,
) -> Operator:  # fmt: skip
    """A function of several operands."""
    computed = None if kernel is None else of_operands(kernel)
    facts = {"dims": elements.elementwise, **facts}
    return Operator(name, slopes, elementwise=True, zero=zero, total=total, kernel=computed, **facts)


def with_attributes(
    name: str, slope: Slope, kernel: Kernel | None = None, *, zero: bool = False, total: bool = True, **facts: Any
) -> Operator:
    """A function of one operand that attributes, or constants behind it, shape further."""
    facts = {"dims": elements.elementwise, **facts}
    return Operator(name, (slope, NONE), elementwise=True, zero=zero, total=total, kernel=kernel, **facts)


def _divided(dividend: Array, right: Array) -> Array:
    """A quotient of whole numbers is cut off. Raises ValueError where it divides by zero."""
    if dividend.dtype.kind not in "iu":
        return np.asarray(dividend / right)
    if not right.all():
        raise ValueError("divided by zero")
    floor, beyond = dividend // right, (dividend % right != 0) & ((dividend < 0) != (right < 0))
    return np.asarray(floor + beyond, dividend.dtype)


def _clipped(attributes: Attributes, operands: Sequence[Any]) -> Array:
    value, low, high = [*operands, None, None][:3]
    low, high = attributes.get("min", low), attributes.get("max", high)
    value = value if low is None else np.maximum(value, np.asarray(low, value.dtype))
    return np.asarray(value if high is None else np.minimum(value, np.asarray(high, value.dtype)))


def _remainder(attributes: Attributes, operands: Sequence[Any]) -> Array:
    if operands[0].dtype.kind in "iu" and not operands[1].all():
        raise ValueError("divided by zero")
    return np.asarray((np.fmod if attributes.get("fmod", 0) else np.mod)(*operands))


def _joined(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    return lambda *operands: reduce(function, operands)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


OPERATORS = (
    # --- functions of one operand ---
    unary("Abs", BENT, np.abs, zero=True, power=1),
    unary("Acos", CURVED, np.arccos),
    unary("Acosh", CURVED, np.arccosh),
    unary("Asin", CURVED, np.arcsin, zero=True),
    unary("Asinh", CURVED, np.arcsinh, zero=True),
    unary("Atan", CURVED, np.arctan, zero=True),
    unary("Atanh", CURVED, np.arctanh, zero=True),
    unary("BitwiseNot", NONE, np.bitwise_not),
    unary("Cast", LINEAR),
    binary("CastLike", (LINEAR, NONE), zero=True, by_type=(1,), dims=elements.of_first),
    unary("Ceil", STEP, np.ceil, zero=True),
    with_attributes("Celu", CURVED, zero=True),
    Operator(
        "Clip", (BENT,), elementwise=True, zero=True, total=True, kernel=_clipped, aside=(1, 2), dims=elements.of_first
    ),
    unary("Cos", CURVED, np.cos),
    unary("Cosh", CURVED, np.cosh),
    with_attributes("Elu", CURVED, zero=True),
    unary("Erf", CURVED, lambda x: _erf(x).astype(x.dtype), zero=True),
    unary("Exp", CURVED, np.exp),
    unary("Floor", STEP, np.floor, zero=True),
    with_attributes("Gelu", CURVED, zero=True),
    with_attributes("HardSigmoid", BENT),
    unary("HardSwish", CURVED, zero=True),
    unary("Identity", LINEAR, np.asarray),
    unary("IsInf", NONE, np.isinf, power=0),
    unary("IsNaN", NONE, np.isnan, power=0),
    with_attributes("LeakyRelu", BENT, zero=True, power=1),
    unary("Log", CURVED, np.log),
    unary("Mish", CURVED, zero=True),
    unary("Neg", LINEAR, np.negative, signs=(-1,)),
    unary("Not", NONE, np.logical_not),
    unary("Reciprocal", CURVED, lambda x: 1 / x, power=-1, exponents=(-1,)),
    unary("Relu", BENT, lambda x: np.maximum(x, 0), zero=True, power=1),
    unary("Round", STEP, np.round, zero=True),
    with_attributes("Selu", CURVED, zero=True),
    with_attributes("Shrink", BENT, zero=True),
    unary("Sigmoid", CURVED, _sigmoid),
    unary("Sign", STEP, np.sign, zero=True, power=0),
    unary("Sin", CURVED, np.sin, zero=True),
    unary("Sinh", CURVED, np.sinh, zero=True),
    unary("Softplus", CURVED),
    unary("Softsign", CURVED, zero=True),
    unary("Sqrt", CURVED, np.sqrt, zero=True, power=0.5),
    with_attributes("Swish", CURVED, zero=True),
    unary("Tan", CURVED, np.tan, zero=True),
    unary("Tanh", CURVED, np.tanh, zero=True),
    with_attributes("ThresholdedRelu", BENT, zero=True),
    # --- arithmetic ---
    binary("Add", (AFFINE,), np.add, signs=(1, 1)),
    binary("Sub", (AFFINE,), np.subtract, signs=(1, -1)),
    binary("Sum", (AFFINE,), _joined(np.add), signs=(1,)),
    binary("Mean", (AFFINE,), lambda *xs: reduce(np.add, xs) / len(xs)),
    binary("Mul", (LINEAR,), np.multiply, zero=True, exponents=(1, 1)),
    binary("Div", (LINEAR, CURVED), _divided, zero=True, power=0, exponents=(1, -1)),
    binary("Pow", (CURVED,), lambda x, y: np.power(x, y).astype(x.dtype), zero=True, raised_to=1),
    binary("Max", (BENT,), _joined(np.maximum), power=1),
    binary("Min", (BENT,), _joined(np.minimum), power=1),
    binary("PRelu", (BENT, AFFINE), zero=True),
    with_attributes("Mod", NONE, _remainder, total=False),
    binary("Where", (NONE, AFFINE), np.where, choosers=(0,), aside=(0,)),
    # --- flags and bits ---
    binary("And", (NONE,), np.logical_and),
    binary("Or", (NONE,), np.logical_or),
    binary("Xor", (NONE,), np.logical_xor),
    binary("Equal", (NONE,), np.equal, power=0, relation="=="),
    binary("Greater", (NONE,), np.greater, power=0, relation=">"),
    binary("GreaterOrEqual", (NONE,), np.greater_equal, power=0, relation=">="),
    binary("Less", (NONE,), np.less, power=0, relation="<"),
    binary("LessOrEqual", (NONE,), np.less_equal, power=0, relation="<="),
    with_attributes("BitShift", NONE),
    binary("BitwiseAnd", (NONE,), np.bitwise_and),
    binary("BitwiseOr", (NONE,), np.bitwise_or),
    binary("BitwiseXor", (NONE,), np.bitwise_xor),
    # --- element by element where nothing is drawn, or along one axis ---
    Operator("Dropout", switch=2, dims=elements.dropout),
    Operator("QuantizeLinear", dims=elements.quantised),
    Operator("DequantizeLinear", dims=elements.quantised),
)
