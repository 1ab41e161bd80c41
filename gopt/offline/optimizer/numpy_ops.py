"""Standard operators on a handful of numbers, so that what an unfamiliar spelling computes is found by trying it.

Everything runs in float64, casts between floats included, so that a formula either agrees to the last digits or
does not agree. An operator that is not known here yields None, and so does everything behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from gopt import limits
from gopt.ir.graph import Node
from gopt.ir.types import FLOATS, TensorType
from gopt.operators.kinds import CASTS

Array = np.ndarray[Any, Any]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Neg": np.negative, "Abs": np.abs, "Sqrt": np.sqrt,
    "Pow": np.power, "Exp": np.exp, "Log": np.log, "Reciprocal": lambda x: 1.0 / x, "Sign": np.sign,
    "Sin": np.sin, "Cos": np.cos, "Tan": np.tan, "Tanh": np.tanh, "Floor": np.floor, "Ceil": np.ceil,
    "Round": np.round, "Relu": lambda x: np.maximum(x, 0), "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Less": np.less, "LessOrEqual": np.less_equal,
    "Equal": np.equal, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor, "Not": np.logical_not,
    "IsNaN": np.isnan, "IsInf": np.isinf, "Where": np.where, "Identity": np.asarray,
    "Max": lambda *xs: _fold(np.maximum, xs), "Min": lambda *xs: _fold(np.minimum, xs),
    "Sum": lambda *xs: _fold(np.add, xs), "Mean": lambda *xs: _fold(np.add, xs) / len(xs),
}  # fmt: skip

_REDUCTIONS: dict[str, Callable[[Array], Any]] = {
    "ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min,
    "ReduceSumSquare": lambda x: np.sum(x * x), "ReduceL1": lambda x: np.sum(np.abs(x)),
    "ReduceL2": lambda x: np.sqrt(np.sum(x * x)), "ReduceProd": np.prod,
}  # fmt: skip

_VIEWS = ("Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Expand")


def _fold(function: Callable[[Any, Any], Any], operands: Sequence[Any]) -> Any:
    result = operands[0]
    for operand in operands[1:]:
        result = function(result, operand)
    return result


def run(node: Node, operands: Sequence[Array | None], type: TensorType, *, flat: bool) -> Array | None:
    """The first output of a node; ``flat``: full-shaped operands are vectors and one-element ones have no shape."""
    missing = any(operand is None for operand, name in zip(operands, node.inputs) if name)
    if missing or node.domain not in ("", "ai.onnx") or (not flat and _large(operands, type)):
        return None
    with np.errstate(all="ignore"):
        try:
            result = _apply(node, operands, type, flat)
        except (TypeError, ValueError, IndexError, OverflowError):
            return None
    return None if result is None else np.asarray(result)


def _large(operands: Sequence[Array | None], type: TensorType) -> bool:
    """Return whether a result is too large to be made, or may be, because its size is not known."""
    if type.static:
        return type.elements > limits.FOLDED_ELEMENTS
    sizes = [operand.size for operand in operands if operand is not None]
    return math.prod(sizes) > limits.FOLDED_ELEMENTS


def _apply(node: Node, operands: Sequence[Array | None], type: TensorType, flat: bool) -> Any:
    x: Any = operands[0] if operands else None
    function = _FUNCTIONS.get(node.op_type)
    if function is not None:
        return function(*operands)
    if node.op_type == "Div":
        divisor: Any = operands[1]
        return x // divisor if x.dtype.kind == "i" and divisor.dtype.kind == "i" else x / divisor
    if node.op_type == "Clip":
        low, high = (operands[place] if place < len(operands) else None for place in (1, 2))
        low = node.attributes.get("min", low)
        high = node.attributes.get("max", high)
        x = x if low is None else np.maximum(x, low)
        return x if high is None else np.minimum(x, high)
    if node.op_type in CASTS:
        return x.astype(np.float64 if type.dtype in FLOATS else bool if type.dtype == "bool" else np.int64)
    if node.op_type in _REDUCTIONS and type.static and type.elements == 1:
        result = _REDUCTIONS[node.op_type](x)
        return result if flat else np.reshape(result, type.dims)
    if node.op_type in _VIEWS and type.static:
        if flat:  # a vector represents a full-shaped value in any layout
            return x if x.size == 1 or node.op_type != "Expand" else None
        return np.broadcast_to(x, type.dims) if node.op_type == "Expand" else np.reshape(x, type.dims)
    if node.op_type == "Shape" and not flat:
        return np.array(np.shape(x)[node.attributes.get("start", 0) : node.attributes.get("end")], np.int64)
    if node.op_type == "ConstantOfShape" and type.static and not flat:
        value = node.attributes.get("value")
        return np.full(type.dims, 0.0 if value is None else onnx.numpy_helper.to_array(value).item())
    if node.op_type == "Concat" and not flat:
        return np.concatenate([np.asarray(each) for each in operands], axis=node.attributes["axis"])
    return None
