"""Standard operators on a handful of numbers, so that what an unfamiliar spelling computes is found by trying it.

Everything runs in float64, casts between floats included, so that a formula either agrees to the last digits or
does not agree. An operator that is not known here yields None, and so does everything behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gopt import limits
from gopt.ir.graph import Node
from gopt.ir.types import FLOATS, TensorType
from gopt.operators.kinds import CASTS, MOVES, RESHAPES
from gopt.operators.table import operator

Array = np.ndarray[Any, Any]


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
    record = operator(node.op_type)
    if node.op_type in CASTS:
        return x.astype(np.float64 if type.dtype in FLOATS else bool if type.dtype == "bool" else np.int64)
    if record.kernel is not None and record.elementwise:
        return record.kernel(node.attributes, operands)
    if record.kernel is not None and record.pieces is not None and type.static and type.elements == 1:
        return np.reshape(record.kernel({"keepdims": 0}, [x]), () if flat else type.dims)
    if flat and type.static and (node.op_type in MOVES or (node.op_type == "Expand" and x.size == 1)):
        return x  # a vector represents a full-shaped value in any layout
    if node.op_type in RESHAPES and type.static and not flat:
        return np.reshape(x, type.dims)
    if node.op_type == "Shape" and not flat:
        return np.array(np.shape(x)[node.attributes.get("start", 0) : node.attributes.get("end")], np.int64)
    return record.kernel(node.attributes, operands) if record.kernel is not None and not flat else None
