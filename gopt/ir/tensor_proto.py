"""Tensors stored in the model file itself: types, and a check of data against dimensions."""

from __future__ import annotations

from onnx import TensorProto

from gopt.errors import InputError, UnsupportedError
from gopt.ir.external_data import check_dims, data_fields
from gopt.ir.types import TensorType, dtype_name

_TYPED_DATA = {  # dtype -> (field, entries per element); all other dtypes are stored in int32_data
    "float32": ("float_data", 1.0), "complex64": ("float_data", 2.0), "float64": ("double_data", 1.0),
    "complex128": ("double_data", 2.0), "int64": ("int64_data", 1.0), "uint64": ("uint64_data", 1.0),
    "uint32": ("uint64_data", 1.0), "string": ("string_data", 1.0),
    "uint4": ("int32_data", 0.5), "int4": ("int32_data", 0.5), "float4e2m1": ("int32_data", 0.5),
}  # fmt: skip


def stored_type(proto: TensorProto, owner: str) -> TensorType:
    """The type of a stored tensor; raises InputError, UnsupportedError in the name of the ``owner``."""
    dtype = dtype_name(proto.data_type)
    if dtype == "undefined":
        if proto.data_type:
            raise UnsupportedError(f"{owner} has element type {proto.data_type}, which gopt does not know")
        raise InputError(f"{owner} has no element type")
    if proto.HasField("segment"):
        raise UnsupportedError(f"{owner} is stored in segments")
    dims = tuple(proto.dims)
    check_dims(dims, dtype, owner)
    return TensorType(dtype, dims)


def check_data(proto: TensorProto, kind: TensorType, owner: str) -> None:
    """Raise InputError unless the number of stored bytes or entries matches the dimensions."""
    if len(fields := data_fields(proto)) > 1:
        raise InputError(f"{owner} holds data in more than one field: {fields[0]} and {fields[1]}")
    if proto.HasField("raw_data"):
        if kind.dtype == "string":
            raise InputError(f"{owner} stores strings as raw data")
        # Protobuf tells a length only by handing out a copy, which goes at once.
        size = len(proto.raw_data)
        if size != kind.nbytes:
            raise InputError(f"{owner} holds {size} bytes, but {kind} takes {kind.nbytes}")
        return
    field, per_element = _TYPED_DATA.get(kind.dtype, ("int32_data", 1.0))
    size = len(getattr(proto, field))
    # Whole numbers only: a float would round above 2**53.
    due = (kind.elements + 1) // 2 if per_element == 0.5 else kind.elements * int(per_element)
    if size != due:
        raise InputError(f"{owner} holds {size} entries of {field}, but {kind} takes {due}")
