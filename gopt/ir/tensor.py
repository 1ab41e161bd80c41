"""A tensor whose value is read only on demand: from memory, a message, a file, an archive, or its pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from gopt.ir.file_reads import read_values
from gopt.ir.types import TensorType, nbytes, numpy_dtype


@dataclass(slots=True)
class Tensor:
    """A constant or an initial value, read from its source only on demand.

    The source is one of: ``array``; ``proto``; ``reader``, a function that returns the array; ``path`` and ``offset``
    of raw little-endian bytes; or ``parts``, flattened pieces in order.
    """

    type: TensorType
    proto: TensorProto | None = None
    array: np.ndarray | None = None
    path: str = ""
    offset: int = 0
    cast_of: Tensor | None = None
    """The tensor of which this one is the cast."""
    parts: tuple[Tensor, ...] = ()
    reader: Callable[[], np.ndarray] | None = None
    """Reads the value from an archive, once."""

    @property
    def nbytes(self) -> int:
        return self.type.nbytes

    @property
    def external(self) -> bool:
        return bool(self.path)

    def numpy(self) -> np.ndarray:
        """The value. A file is read, and not kept: one that is truncated meanwhile raises RunError."""
        if self.array is None and self.reader is not None:
            self.array = self.reader()
        if self.array is not None:
            return self.array
        if self.cast_of is not None:
            return np.asarray(self.cast_of.read()).astype(numpy_dtype(self.type.dtype))
        if self.parts:
            flat, start = np.empty(self.type.elements, numpy_dtype(self.type.dtype)), 0
            for part in self.parts:
                flat[start : start + part.type.elements] = part.numpy().reshape(-1)
                start += part.type.elements
            return flat.reshape(self.type.dims)
        if self.path:
            return read_values(self.path, self.offset, self.type)
        assert self.proto is not None
        return onnx.numpy_helper.to_array(self.proto)

    def read(self) -> np.ndarray:
        """As ``numpy``, but what a reader gives is not kept: for a value that is written and no more."""
        return self.reader() if self.array is None and self.reader is not None else self.numpy()

    def copied(self) -> np.ndarray:
        """The value in memory of its own."""
        if self.array is None and self.reader is None and self.cast_of is None and not self.parts and self.path:
            return read_values(self.path, self.offset, self.type)
        return np.array(self.read())

    def __repr__(self) -> str:
        return f"<Tensor {self.type}>"

    def flat(self) -> Callable[[int, int], np.ndarray]:
        """A function that gives elements ``start`` to ``stop`` of the flattened value; of a file these alone are
        read."""
        if self.path and self.array is None:
            return lambda start, stop: self.flat_slice(start, stop).numpy()
        whole = self.read().reshape(-1)
        return lambda start, stop: whole[start:stop]

    def flat_slice(self, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, which must be in memory, as a view, or stored
        in a file, of which nothing is read."""
        type = TensorType(self.type.dtype, (stop - start,))
        if self.array is not None:
            return Tensor(type, array=self.array.reshape(-1)[start:stop])
        return Tensor(type, path=self.path, offset=self.offset + nbytes(type.dtype, start))
