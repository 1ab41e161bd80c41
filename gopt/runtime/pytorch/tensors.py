"""Arrays as tensors of PyTorch over the same memory, and back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from gopt.errors import UnsupportedError
from gopt.ir.types import numpy_dtype
from gopt.runtime.host_value import PACKED
from gopt.runtime.session import Array

_BITS = {1: "uint8", 2: "uint16"}
"""Size of an element -> the type in which NumPy and PyTorch exchange types unknown to NumPy."""


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The type of PyTorch with these elements. Raises UnsupportedError for strings and types of half a byte."""
    dtype_of_name = getattr(torch, dtype.name, None)
    if not isinstance(dtype_of_name, torch.dtype) or dtype.name in PACKED:
        raise UnsupportedError(f"PyTorch has no tensors of {dtype}", "run it with --engine threads or mpi")
    return dtype_of_name


@functools.cache
def array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The inverse of ``torch_dtype``."""
    return numpy_dtype(str(dtype).removeprefix("torch.").replace("_", "").replace("e8m0fnu", "e8m0"))


def tensor_over(array: Array) -> torch.Tensor:
    """A tensor over an array's memory; a copy of a read-only array, and of an array with gaps."""
    dtype = torch_dtype(array.dtype)
    array = np.asarray(array)  # a scalar of NumPy is no array
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(_BITS[array.itemsize])).view(dtype)


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the order of its elements, on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def array_over(tensor: torch.Tensor) -> Array:
    """An array over a tensor's memory, for a tensor of the host."""
    tensor = tensor.detach().contiguous()
    dtype = array_dtype(tensor.dtype)
    if dtype.isbuiltin == 1:
        return np.asarray(tensor.numpy())
    bits = getattr(torch, _BITS[dtype.itemsize])
    return np.asarray(tensor.view(bits).numpy()).view(dtype)
