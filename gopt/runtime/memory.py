"""Reused memory. A new page costs more than the work on the page, so a step should allocate none."""

from __future__ import annotations

import ctypes
import math
import resource
import sys
import threading
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from gopt.collectives.layout import total_elements
from gopt.runtime.host_value import address_of
from gopt.runtime.session import Array

ALIGN = 64
"""Bytes to which long rows are aligned: a vector that straddles two cache lines costs two."""


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array at an address that is a multiple of ``ALIGN`` bytes."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + ALIGN, np.uint8)
    start = -address_of(memory) % ALIGN
    return memory[start : start + size].view(dtype).reshape(shape)


def bits(array: Array) -> Array:
    """The bytes of an array: a view of a contiguous array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Pool:
    """Arrays with memory that is reused once no view is referenced.

    Threads may share a pool."""

    def __init__(self) -> None:
        self._held: dict[int, list[Array]] = {}
        self._next: dict[int, int] = {}
        self._lock = threading.Lock()
        self._alone = _references([np.empty(1, np.uint8)], 0)

    def take(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array. The search begins behind the last array found: memory taken first is usually free
        first."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            arrays, begin = self._held.setdefault(size, []), self._next.get(size, 0)
            for step in range(len(arrays)):
                index = (begin + step) % len(arrays)
                if _references(arrays, index) == self._alone:
                    break
            else:
                index = len(arrays)
                arrays.append(np.empty(size + ALIGN, np.uint8))
            self._next[size] = index + 1
            start = -address_of(arrays[index]) % ALIGN
            return arrays[index][start : start + size].view(dtype).reshape(shape)


def packed_view(arrays: Sequence[Array]) -> Array | None:
    """Return adjacent arrays of one flat array as this flat array; None for other arrays."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1) if arrays[0].flags.c_contiguous else None
    base = arrays[0].base
    if not isinstance(base, np.ndarray) or any(x.base is not base or not x.flags.c_contiguous for x in arrays):
        return None
    starts = [address_of(array) for array in arrays]
    if base.ndim != 1 or any(a + x.nbytes != b for a, b, x in zip(starts, starts[1:], arrays)):
        return None
    offset = starts[0] - address_of(base)
    flat: Array = base.view(np.uint8)[offset : offset + sum(array.nbytes for array in arrays)].view(arrays[0].dtype)
    return flat


def packed(arrays: Sequence[Array]) -> Array:
    """The arrays as one flat array: a view of adjacent arrays, else a copy."""
    flat = packed_view(arrays)
    return np.concatenate([array.reshape(-1) for array in arrays]) if flat is None else flat


def unpack_views(flat: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
    """Views of a flat array as adjacent arrays of these shapes: the inverse of ``packed``."""
    ends = [0, *accumulate(total_elements([shape]) for shape in shapes)]
    return [flat[start:stop].reshape(shape) for (start, stop), shape in zip(pairwise(ends), shapes, strict=True)]


def is_aligned(array: Array) -> bool:
    return address_of(array) % ALIGN == 0


def same_memory(one: Array, twin: Array) -> bool:
    """Return whether two arrays begin at the same address."""
    return address_of(one) == address_of(twin)


def _references(arrays: list[Array], index: int) -> int:
    """The number of references to an array of a list, views of it included."""
    return sys.getrefcount(arrays[index])


def give_back() -> None:
    """Give freed memory back to the system. The C library keeps such memory, in pieces between live blocks, too small
    for a larger value."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def peak_memory() -> int:
    """The largest memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
