"""Arrays of the user as an input takes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from gopt.errors import InputError
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.host_value import array_dtype
from gopt.runtime.session import Array


def fitted(name: str, type: TensorType, value: Any) -> Array:
    """An array of a type, converted in width where it must be. Raises InputError for another shape or kind."""
    if value is None:
        raise InputError(f"the data has no {name!r}", f"yield dictionaries with an array {name!r} of {type}")
    array = np.asarray(value)
    if array.shape != type.dims:
        raise InputError(
            f"the data's {name!r} has shape {list(array.shape)}, the step takes {type}", "yield batches of that shape"
        )
    return array if array_dtype(array) == type.dtype else cast(name, type, array)


def cast(what: str, type: TensorType, array: Array) -> Array:
    """Convert an array to the type's width. Raises InputError for another kind of number."""
    check_kind(what, type, array.dtype)
    return array.astype(numpy_dtype(type.dtype))


def check_kind(what: str, type: TensorType, held: np.dtype[Any]) -> None:
    """Raise InputError where numbers of type ``held`` are of another kind than a type's."""
    kinds = {"b": "b", "i": "i", "u": "i", "f": "f", "V": "f"}
    if kinds.get(held.kind) != kinds.get(numpy_dtype(type.dtype).kind):
        raise InputError(
            f"{what} is {held}, the step takes {type}", "convert it: gopt changes the width of numbers alone"
        )


def class_of(value: Any) -> str:
    """The name of a value's class."""
    return type(value).__name__
