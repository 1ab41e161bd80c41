"""Operators that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from gopt.operators.calls import draws, quantise
from gopt.operators.dims import elements
from gopt.operators.operator import Array, Attributes, Kernel, Operator, Slope, of_operands
from gopt.operators.torch_call import TYPES, number_if_constant

NONE, STEP, LINEAR, AFFINE, BENT, CURVED = Slope

_erf = np.vectorize(math.erf, otypes=[np.float64])


def unary(
    name: str, slope: Slope, kernel: Callable[..., Any] | None = None, *, zero: bool = False, finite: bool = True,
    **facts: Any,
) -> Operator:  # fmt: skip
    """A function of one operand; ``zero``: it is zero at zero."""
    return binary(name, (slope, NONE), kernel, zero=zero or slope is LINEAR, finite=finite, **facts)


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
    facts = {"dims": elements.elementwise, "finite": True, **facts}
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


def _clamped(torch: Any, attributes: Attributes, value: Any, low: Any = None, high: Any = None) -> Any:
    low, high = attributes.get("min", low), attributes.get("max", high)
    value = value if low is None else torch.maximum(value, torch.as_tensor(low, dtype=value.dtype))
    return value if high is None else torch.minimum(value, torch.as_tensor(high, dtype=value.dtype))


def _infinite(torch: Any, attributes: Attributes, value: Any) -> Any:
    above, below = (attributes.get(f"detect_{sign}", 1) for sign in ("positive", "negative"))
    return torch.isposinf(value) & bool(above) | torch.isneginf(value) & bool(below)


def _shrunk(torch: Any, attributes: Attributes, value: Any) -> Any:
    edge, bias = attributes.get("lambd", 0.5), attributes.get("bias", 0.0)
    return torch.where(value < -edge, value + bias, torch.where(value > edge, value - bias, 0))


OPERATORS = (
    # --- functions of one operand ---
    unary("Abs", BENT, np.abs, zero=True, power=1, torch="abs"),
    unary("Acos", CURVED, np.arccos, finite=False, torch="acos"),
    unary("Acosh", CURVED, np.arccosh, finite=False, torch="acosh"),
    unary("Asin", CURVED, np.arcsin, finite=False, zero=True, torch="asin"),
    unary("Asinh", CURVED, np.arcsinh, zero=True, torch="asinh"),
    unary("Atan", CURVED, np.arctan, zero=True, torch="atan"),
    unary("Atanh", CURVED, np.arctanh, finite=False, zero=True, torch="atanh"),
    unary("BitwiseNot", NONE, np.bitwise_not, torch="bitwise_not"),
    unary("Cast", LINEAR, torch=lambda t, a, x: x.to(getattr(t, TYPES[a["to"]]))),
    binary(
        "CastLike", (LINEAR, NONE), zero=True, by_type=(1,), dims=elements.of_first,
        torch=lambda t, a, x, like: x.to(like.dtype),
    ),
    unary("Ceil", STEP, np.ceil, zero=True, torch="ceil"),
    with_attributes("Celu", CURVED, zero=True, torch=lambda t, a, x: t.celu(x, a.get("alpha", 1.0))),
    Operator(
        "Clip", (BENT,), elementwise=True, zero=True, total=True, kernel=_clipped, aside=(1, 2), dims=elements.of_first,
        torch=_clamped,
    ),
    unary("Cos", CURVED, np.cos, torch="cos"),
    unary("Cosh", CURVED, np.cosh, torch="cosh"),
    with_attributes("Elu", CURVED, zero=True, torch=lambda t, a, x: t.nn.functional.elu(x, a.get("alpha", 1.0))),
    unary("Erf", CURVED, lambda x: _erf(x).astype(x.dtype), zero=True, torch="erf"),
    unary("Exp", CURVED, np.exp, torch="exp"),
    unary("Floor", STEP, np.floor, zero=True, torch="floor"),
    with_attributes(
        "Gelu", CURVED, zero=True,
        torch=lambda t, a, x: t.nn.functional.gelu(x, approximate=a.get("approximate", "none")),
    ),
    with_attributes(
        "HardSigmoid", BENT, torch=lambda t, a, x: (a.get("alpha", 0.2) * x + a.get("beta", 0.5)).clamp(0, 1)
    ),
    unary("HardSwish", CURVED, zero=True, torch="nn.functional.hardswish"),
    unary("Identity", LINEAR, np.asarray, torch=lambda t, a, x: x),
    unary("IsInf", NONE, np.isinf, power=0, torch=_infinite),
    unary("IsNaN", NONE, np.isnan, power=0, torch="isnan"),
    with_attributes(
        "LeakyRelu", BENT, zero=True, power=1, torch=lambda t, a, x: t.nn.functional.leaky_relu(x, a.get("alpha", 0.01))
    ),
    unary("Log", CURVED, np.log, finite=False, finite_above_zero=True, torch="log"),
    unary("Mish", CURVED, zero=True, torch="nn.functional.mish"),
    unary("Neg", LINEAR, np.negative, signs=(-1,), torch="neg"),
    unary("Not", NONE, np.logical_not, torch="logical_not"),
    unary(
        "Reciprocal", CURVED, lambda x: 1 / x, finite=False, finite_above_zero=True, power=-1, exponents=(-1,),
        torch="reciprocal",
    ),
    unary("Relu", BENT, lambda x: np.maximum(x, 0), zero=True, power=1, torch="relu"),
    unary("Round", STEP, np.round, zero=True, torch="round"),
    with_attributes(
        "Selu", CURVED, zero=True, torch=lambda t, a, x:
        a.get("gamma", 1.0507009873554805) * t.nn.functional.elu(x, a.get("alpha", 1.6732632423543772)),
    ),
    with_attributes("Shrink", BENT, zero=True, torch=_shrunk),
    unary("Sigmoid", CURVED, _sigmoid, torch="sigmoid"),
    unary("Sign", STEP, np.sign, zero=True, power=0, torch="sign"),
    unary("Sin", CURVED, np.sin, zero=True, torch="sin"),
    unary("Sinh", CURVED, np.sinh, zero=True, torch="sinh"),
    unary("Softplus", CURVED, torch=lambda t, a, x: t.nn.functional.softplus(x, 1, 40)),
    unary("Softsign", CURVED, zero=True, torch="nn.functional.softsign"),
    unary("Sqrt", CURVED, np.sqrt, finite=False, finite_above_zero=True, zero=True, power=0.5, torch="sqrt"),
    with_attributes("Swish", CURVED, zero=True, torch=lambda t, a, x: x * t.sigmoid(a.get("alpha", 1.0) * x)),
    unary("Tan", CURVED, np.tan, finite=False, zero=True, torch="tan"),
    unary("Tanh", CURVED, np.tanh, zero=True, torch="tanh"),
    with_attributes("ThresholdedRelu", BENT, zero=True, torch=lambda t, a, x: t.where(x > a.get("alpha", 1.0), x, 0)),
    # --- arithmetic ---
    binary("Add", (AFFINE,), np.add, signs=(1, 1), torch="add"),
    binary("Sub", (AFFINE,), np.subtract, signs=(1, -1), torch="sub"),
    binary("Sum", (AFFINE,), _joined(np.add), signs=(1,), torch=lambda t, a, *xs: reduce(t.add, xs)),
    binary(
        "Mean", (AFFINE,), lambda *xs: reduce(np.add, xs) / len(xs), torch=lambda t, a, *xs: reduce(t.add, xs) / len(xs)
    ),
    binary("Mul", (LINEAR,), np.multiply, zero=True, exponents=(1, 1), torch="mul"),
    binary(
        "Div", (LINEAR, CURVED), _divided, zero=True, power=0, exponents=(1, -1),
        torch=lambda t, a, x, y: t.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"),
    ),
    binary(
        "Pow", (CURVED,), lambda x, y: np.power(x, y).astype(x.dtype), zero=True, raised_to=1,
        torch=lambda t, a, x, y: t.pow(x, number_if_constant(t, y, x.ndim)).to(x.dtype),
    ),
    binary("Max", (BENT,), _joined(np.maximum), power=1, torch=lambda t, a, *xs: reduce(t.maximum, xs)),
    binary("Min", (BENT,), _joined(np.minimum), power=1, torch=lambda t, a, *xs: reduce(t.minimum, xs)),
    binary("PRelu", (BENT, AFFINE), zero=True, torch=lambda t, a, x, slope: t.where(x < 0, slope * x, x)),
    with_attributes(
        "Mod", NONE, _remainder, total=False, finite=False,
        torch=lambda t, a, x, y: (t.fmod if a.get("fmod", 0) else t.remainder)(x, y),
    ),
    binary("Where", (NONE, AFFINE), np.where, choosers=(0,), aside=(0,), torch="where"),
    # --- flags and bits ---
    binary("And", (NONE,), np.logical_and, torch="logical_and"),
    binary("Or", (NONE,), np.logical_or, torch="logical_or"),
    binary("Xor", (NONE,), np.logical_xor, torch="logical_xor"),
    binary("Equal", (NONE,), np.equal, power=0, relation="==", torch="eq"),
    binary("Greater", (NONE,), np.greater, power=0, relation=">", torch="gt"),
    binary("GreaterOrEqual", (NONE,), np.greater_equal, power=0, relation=">=", torch="ge"),
    binary("Less", (NONE,), np.less, power=0, relation="<", torch="lt"),
    binary("LessOrEqual", (NONE,), np.less_equal, power=0, relation="<=", torch="le"),
    with_attributes("BitShift", NONE, torch=lambda t, a, x, y: (x << y) if a["direction"] == "LEFT" else (x >> y)),
    binary("BitwiseAnd", (NONE,), np.bitwise_and, torch="bitwise_and"),
    binary("BitwiseOr", (NONE,), np.bitwise_or, torch="bitwise_or"),
    binary("BitwiseXor", (NONE,), np.bitwise_xor, torch="bitwise_xor"),
    # --- element by element where nothing is drawn, or along one axis ---
    Operator("Dropout", switch=2, dims=elements.dropout, torch=draws.dropout),
    Operator("QuantizeLinear", dims=elements.quantised, torch=quantise.quantise),
    Operator("DequantizeLinear", dims=elements.quantised, torch=quantise.restore),
)  # fmt: skip
