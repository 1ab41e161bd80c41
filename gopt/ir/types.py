"""Element types and tensor types: one table from the manifest's words to ONNX and NumPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gopt import limits

if TYPE_CHECKING:
    import numpy as np

_TABLE: dict[str, tuple[int, float]] = {
    "float32": (1, 4), "uint8": (2, 1), "int8": (3, 1), "uint16": (4, 2), "int16": (5, 2), "int32": (6, 4),
    "int64": (7, 8), "string": (8, 0), "bool": (9, 1), "float16": (10, 2), "float64": (11, 8),
    "uint32": (12, 4), "uint64": (13, 8), "complex64": (14, 8), "complex128": (15, 16), "bfloat16": (16, 2),
    "float8e4m3fn": (17, 1), "float8e4m3fnuz": (18, 1), "float8e5m2": (19, 1), "float8e5m2fnuz": (20, 1),
    "uint4": (21, 0.5), "int4": (22, 0.5), "float4e2m1": (23, 0.5), "float8e8m0": (24, 1),
}  # fmt: skip
_NAMES = {code: name for name, (code, _) in _TABLE.items()}

FLOATS = frozenset({"float32", "float16", "bfloat16", "float64"})
LOW_PRECISION = frozenset({"float16", "bfloat16"})


def dtype_name(code: int) -> str:
    """``1`` -> ``float32``; an unknown or absent code is ``undefined``."""
    return _NAMES.get(code, "undefined")


def dtype_code(name: str) -> int:
    """Return ``float32`` -> the number in ONNX."""
    return _TABLE[name][0]


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return ``bfloat16`` -> the NumPy type; raises KeyError for an unknown word."""
    import numpy as np
    import onnx

    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype_code(name)))


def scalar_of(value: float, dtype: str) -> np.ndarray:
    """A number as an array without dimensions, of an element type."""
    import numpy as np

    return np.array(value, numpy_dtype(dtype))


def known(name: str) -> bool:
    return name in _TABLE


def nbytes(dtype: str, elements: int) -> int:
    """Bytes ``elements`` elements take when stored raw."""
    return math.ceil(_TABLE[dtype][1] * elements) if dtype in _TABLE else 0


def multiple(factor: int, size: int | str) -> int | str:
    """The length of a dimension with ``factor`` times as many elements as another."""
    return factor * size if isinstance(size, int) else size if factor == 1 else f"{factor}*{size}"


def length(size: int | str | None, known: Mapping[str, int]) -> int | str | None:
    """The length of a dimension; ``known``: lengths of open dimensions, perhaps by a factor shorter."""
    if not isinstance(size, str):
        return size
    factor, _, name = size.rpartition("*")
    return int(factor or 1) * known[name] if name in known and (factor or "1").isdecimal() else known.get(size, size)


LARGEST = 16
"""Bytes of an element of the largest type."""


def overflows(shape: Iterable[int | str | bytes | None] | None) -> bool:
    """Return whether so many elements, in any type, take 2**63 bytes: no file and no manifest can say so many.

    A zero beside huge sizes is not an excuse: strides overflow all the same.
    """
    sizes = [max(size, 1) for size in shape or () if isinstance(size, int)]
    return math.prod(sizes) * LARGEST >= limits.ELEMENTS


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape; an unknown dimension is a symbol or None; without a known rank the shape is None.

    ``static``: every dimension is a number; ``elements``: the product, 0 if not static; ``nbytes``: the memory.
    """

    dtype: str
    shape: tuple[int | str | None, ...] | None
    static: bool = field(init=False, repr=False, compare=False)
    elements: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked for in every sweep, so settled once.
        sizes = [size for size in self.shape or () if isinstance(size, int)]
        static = self.shape is not None and len(sizes) == len(self.shape)
        object.__setattr__(self, "static", static)
        elements = math.prod(sizes) if static else 0
        object.__setattr__(self, "elements", elements)
        object.__setattr__(self, "nbytes", nbytes(self.dtype, elements))
        object.__setattr__(self, "_hash", hash((self.dtype, self.shape)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[TensorType], tuple[object, ...]]:
        return TensorType, (self.dtype, self.shape)  # hashes of texts differ between processes

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape, which must be static."""
        assert self.static
        return self.shape  # type: ignore[return-value]

    def may_have_shape_of(self, wanted: TensorType) -> bool:
        """Return whether the shape, as far as known, can be the shape of another type."""
        if self.shape is None or wanted.shape is None:
            return True
        return len(self.shape) == len(wanted.shape) and all(
            size == due or not isinstance(size, int) for size, due in zip(self.shape, wanted.shape)
        )

    def __str__(self) -> str:
        if self.shape is None:
            return f"{self.dtype}[?]"
        return f"{self.dtype}[{','.join('?' if size is None else str(size) for size in self.shape)}]"
