"""Tensor types as ONNX writes them: TypeProto and ValueInfoProto."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import onnx

from gopt.ir.types import TensorType, dtype_code, dtype_name
from gopt.ir.wire_format import field


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


def encoded_values(number: int, types: Mapping[str, TensorType]) -> bytes:
    """Return names and types of values, serialized as fields of a graph: 11 for inputs, 12 for outputs."""
    return b"".join([field(number, field(1, name.encode()) + _encoded_type(type)) for name, type in types.items()])


@functools.lru_cache(4096)
def _encoded_type(type: TensorType) -> bytes:
    """Return a type as a field of a value; nothing for an undefined type."""
    return b"" if type.dtype == "undefined" else field(2, _type_proto(type).SerializeToString(deterministic=True))


@functools.lru_cache(4096)
def _type_proto(type: TensorType) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype_code(type.dtype), type.shape)
