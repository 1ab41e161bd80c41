"""The derivative of a maximum over windows: each window gives its derivative to the place of its maximum.

The operator counts places through the whole batch. Here, places count within each channel of each sample, so samples
stay apart: the derivative of a part of the batch is the part of the derivative.
"""

from __future__ import annotations

from math import prod

import numpy as np
from onnx import TensorProto, helper

from gopt.autodiff.operators import ForwardOperator
from gopt.ir.tape import ProtoTape

ADDS = 16
"""The first operator set whose ScatterElements adds."""
_WIDE = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}
"""Types in which ONNX Runtime adds scattered elements."""


def differentiate_max_pool(
    operator: ForwardOperator, emit: ProtoTape, adjoint: str, wanted: set[int]
) -> dict[int, str]:
    """Emit the derivative by the operand, given the derivative by the result (N, C, places of windows)."""
    node, name = operator.node, operator.node.input[0]
    shape, pooled = operator.shape(name), operator.shape(node.output[0])
    channels, inside = list(shape[:2]), prod(shape[2:])
    dtype = operator.dtype(name)
    wide = _WIDE.get(dtype, TensorProto.FLOAT)
    chosen = f"{emit.op('MaxPool', name, **{**operator.attributes, 'storage_order': 0})}.places"
    emit.nodes[-1].output.append(chosen)
    targets = emit.reshape(emit.op("Mod", chosen, emit.ints([inside])), [*channels, prod(pooled[2:])])
    values = emit.reshape(adjoint, [*channels, prod(pooled[2:])])
    if dtype not in _WIDE:
        values = emit.op("Cast", values, to=wide)
    zeros = emit.filled([*channels, inside], np.zeros(1, helper.tensor_dtype_to_np_dtype(wide)))
    scattered = emit.op("ScatterElements", zeros, targets, values, axis=2, reduction="add")
    if dtype not in _WIDE:
        scattered = emit.op("CastLike", scattered, name)
    return {0: emit.reshape(scattered, shape)}
