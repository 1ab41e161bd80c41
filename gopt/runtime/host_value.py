"""Values in host memory, as arrays and as ONNX Runtime's values over the same memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from gopt.errors import RunError, UnsupportedError
from gopt.ir.types import dtype_code, dtype_name
from gopt.runtime.session import Array, runtime

PACKED = frozenset({"int4", "uint4", "float4e2m1"})
"""NumPy keeps one element in a byte, the runtime two."""


def address_of(array: Array) -> int:
    """Return the address of an array's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def array_dtype(array: Array) -> str:
    """The manifest's name of an array's element type; raises RunError for a type outside ONNX."""
    return dtype_word(array.dtype)


@functools.cache
def dtype_word(dtype: np.dtype[Any]) -> str:
    """The manifest's name of an element type; raises RunError for a type outside ONNX."""
    try:
        return dtype_name(onnx.helper.np_dtype_to_tensor_dtype(dtype))
    except (ValueError, KeyError):
        raise RunError(f"ONNX has no tensors of {dtype}") from None


def runtime_value(array: Array) -> Any:
    """An OrtValue over an array's memory; the value keeps the array alive."""
    dtype = array_dtype(array)
    array = np.require(array, requirements="C")
    values = runtime().OrtValue
    if dtype == "string" or array.dtype == object:
        raise UnsupportedError("ONNX Runtime takes no strings here")
    if dtype in PACKED:
        raise UnsupportedError(f"tensors of {dtype} cannot be an input or output of a segment")
    if array.dtype.isbuiltin == 2:  # one of NumPy's add-on types, which the runtime takes as mere bits
        return values.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), dtype_code(dtype))
    return values.ortvalue_from_numpy(array)


class _Memory:
    """An OrtValue's memory as NumPy's array interface. The array keeps this object alive, and this object the value."""

    def __init__(self, value: Any, shape: Sequence[int], itemsize: int) -> None:
        self.value = value
        # As plain bits: NumPy's protocol has no name for bfloat16.
        self.__array_interface__ = {
            "data": (value.data_ptr(), False), "shape": tuple(shape), "typestr": f"<V{itemsize}", "version": 3,
        }  # fmt: skip


def array_of(value: Any) -> Array:
    """An array over an OrtValue's own memory."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
    shape = value.shape()
    if dtype.hasobject:
        result: Array = value.numpy()
        return result
    if 0 in shape:
        return np.zeros(shape, dtype)  # no memory to look at: its address is null
    return np.asarray(_Memory(value, shape, dtype.itemsize)).view(dtype)


class Value:
    """A value in host memory: an array, and the OrtValue over the same memory, each created on first use.

    ``persistent``: the memory is the same in all steps, so readers may keep references."""

    __slots__ = ("_address", "_array", "_given", "persistent")

    def __init__(self, array: Array | None = None, native: Any = None, persistent: bool = False) -> None:
        self._array, self._given, self.persistent = array, native, persistent
        self._address: int | None = None

    @property
    def array(self) -> Array:
        if self._array is None:
            self._array = array_of(self._given)
        return self._array

    @property
    def address(self) -> int:
        """Address of the value's memory."""
        if self._address is None:
            self._address = address_of(self.array)
        return self._address

    @property
    def addressed(self) -> bool:
        """Whether the value is an array with a type that can be bound by address."""
        return self._array is not None and self._array.dtype.isbuiltin == 1 and self._array.flags.c_contiguous

    @property
    def given(self) -> Any:
        """The value for ONNX Runtime; raises UnsupportedError, and RunError for a rejected tensor."""
        if self._given is None:
            self._given = runtime_value(self.array)
        return self._given


def bind_memory(bind: Any, name: str, array: Array) -> None:
    """Bind an array by address. Unlike a value, a binding does not keep the array alive, so the caller must."""
    bind(name, "cpu", 0, array.dtype.type, array.shape, address_of(array))
