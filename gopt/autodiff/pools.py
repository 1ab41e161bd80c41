"""The derivative of a maximum over windows: each window gives its own to the place where its maximum stands.

The operator says the places, counted through the whole batch. They are counted anew within each channel of each sample
here, so that samples stay apart: the derivative of a part of the batch is the part of the derivative.
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
    """Emit the derivative by the operand, from that by the result (N, C, places of windows); returns it by operand."""
    node, name = operator.node, operator.node.input[0]
    shape, made = operator.shape(name), operator.shape(node.output[0])
    channels, inside = list(shape[:2]), prod(shape[2:])
    dtype = operator.dtype(name)
    wide = _WIDE.get(dtype, TensorProto.FLOAT)
    chosen = f"{emit.op('MaxPool', name, **{**operator.attributes, 'storage_order': 0})}.places"
    emit.nodes[-1].output.append(chosen)
    places = emit.reshape(emit.op("Mod", chosen, emit.ints([inside])), [*channels, prod(made[2:])])
    given = emit.reshape(adjoint, [*channels, prod(made[2:])])
    if dtype not in _WIDE:
        given = emit.op("Cast", given, to=wide)
    zeros = emit.filled([*channels, inside], np.zeros(1, helper.tensor_dtype_to_np_dtype(wide)))
    found = emit.op("ScatterElements", zeros, places, given, axis=2, reduction="add")
    if dtype not in _WIDE:
        found = emit.op("CastLike", found, name)
    return {0: emit.reshape(found, shape)}
