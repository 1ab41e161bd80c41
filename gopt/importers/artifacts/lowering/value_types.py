"""The types of the values of a training graph before the operators are lowered."""

from __future__ import annotations

import onnx
from onnx import ModelProto

from gopt.ir.external_data import check_dims, show
from gopt.ir.type_proto import read_type
from gopt.ir.types import TensorType, dtype_name


def value_types(model: ModelProto) -> dict[str, TensorType]:
    """The declared types, and those that ONNX infers of standard operators. Raises InputError for absurd sizes."""
    try:
        body = onnx.shape_inference.infer_shapes(model, strict_mode=False).graph
    except MemoryError:
        raise
    except Exception:  # its exceptions have no common base; a lowering that needs a type says so
        body = model.graph
    types = {value.name: read_type(value.type) for value in (*body.value_info, *body.input, *body.output)}
    types |= {
        value.name: TensorType(dtype_name(value.data_type), tuple(value.dims)) for value in model.graph.initializer
    }
    for name, type in types.items():
        check_dims(type.shape or (), type.dtype, f"value {show(name)}")
    return types
