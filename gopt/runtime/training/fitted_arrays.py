"""Arrays of the user as an input takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gopt.errors import InputError
from gopt.ir.types import TensorType, length, numpy_dtype
from gopt.runtime.host_value import array_dtype
from gopt.runtime.session import Array


def sized(types: Mapping[str, TensorType], values: Mapping[str, Any]) -> dict[str, TensorType]:
    """Types with open dimensions at a batch's sizes. Raises InputError where two inputs have a shared dimension in two
    sizes."""
    sizes: dict[str, tuple[str, int]] = {}
    for name, type in types.items():
        shape = np.shape(values[name]) if not type.static and values.get(name) is not None else ()
        for size, width in zip(type.shape or (), shape):
            if isinstance(size, str) and sizes.setdefault(size, (name, width))[1] != width:
                raise InputError(
                    f"the data's {name!r} has {width} samples, and its {sizes[size][0]!r} {sizes[size][1]}",
                    "yield batches of as many samples of each",
                )
    return {name: closed(type, {size: width for size, (_, width) in sizes.items()}) for name, type in types.items()}


def closed(type: TensorType, sizes: Mapping[str, int]) -> TensorType:
    """The type with open dimensions at these sizes."""
    if type.static or type.shape is None:
        return type
    return TensorType(type.dtype, tuple(length(size, sizes) for size in type.shape))


def fitted(name: str, type: TensorType, value: Any) -> Array:
    """An array of a type, converted in width where needed. Raises InputError for another shape or kind."""
    if value is None:
        raise InputError(f"the data has no {name!r}", f"yield dictionaries with an array {name!r} of {type}")
    array = np.asarray(value)
    if not TensorType(type.dtype, array.shape).may_have_shape_of(type):
        raise InputError(
            f"the data's {name!r} has shape {list(array.shape)}, the step takes {type}", "yield batches of that shape"
        )
    return array if array_dtype(array) == type.dtype else cast(name, type, array)


def cast(what: str, type: TensorType, array: Array) -> Array:
    """Convert an array to the type's width. Raises InputError for another kind of number."""
    check_kind(what, type, array.dtype)
    return array.astype(numpy_dtype(type.dtype))


def check_kind(what: str, type: TensorType, dtype: np.dtype[Any]) -> None:
    """Raise InputError where numbers of type ``dtype`` are of another kind than a type's."""
    kinds = {"b": "b", "i": "i", "u": "i", "f": "f", "V": "f"}
    if kinds.get(dtype.kind) != kinds.get(numpy_dtype(type.dtype).kind):
        raise InputError(
            f"{what} is {dtype}, the step takes {type}", "convert it: gopt changes the width of numbers alone"
        )


def class_of(value: Any) -> str:
    """The name of a value's class."""
    return type(value).__name__
