"""Tensor types as ONNX writes them: TypeProto and ValueInfoProto."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import onnx

from gopt.ir.types import TensorType, dtype_code, dtype_name


def read_type(proto: onnx.TypeProto) -> TensorType:
    """The TensorType of a TypeProto; anything but a dense tensor is ``undefined[?]``."""
    if not proto.HasField("tensor_type"):
        return TensorType("undefined", None)
    tensor = proto.tensor_type
    shape: Iterable[int | str | None] | None = None
    if tensor.HasField("shape"):
        shape = tuple(
            d.dim_value if d.HasField("dim_value") else (d.dim_param or None) if d.HasField("dim_param") else None
            for d in tensor.shape.dim
        )
    return TensorType(dtype_name(tensor.elem_type), tuple(shape) if shape is not None else None)


def value_info(name: str, type: TensorType) -> onnx.ValueInfoProto:
    """The name and type of a value; an undefined type is left out."""
    if type.dtype == "undefined":
        info = onnx.ValueInfoProto()
        info.name = name
        return info
    return onnx.ValueInfoProto(name=name, type=_type_proto(type))


@functools.lru_cache(4096)
def _type_proto(type: TensorType) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype_code(type.dtype), type.shape)
