"""A tensor with a value read only on demand: from memory, a message, a file, an archive, or pieces."""

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
    """A constant or an initial value, read from the source only on demand.

    The source is one of: ``array``; ``proto``; ``reader``, a function returning the array; ``path`` and ``offset`` of
    raw little-endian bytes; or ``parts``, flattened pieces in order.
    """

    type: TensorType
    proto: TensorProto | None = None
    array: np.ndarray | None = None
    path: str = ""
    offset: int = 0
    cast_of: Tensor | None = None
    """The tensor that this tensor is cast from."""
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
        """Return the value. A file is read, and not kept: a file truncated meanwhile raises RunError."""
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
        """Return the value as ``numpy`` does, without keeping a reader's result: for a value only to be written."""
        return self.reader() if self.array is None and self.reader is not None else self.numpy()

    def copied(self) -> np.ndarray:
        """Return the value in new memory."""
        if self.array is None and self.reader is None and self.cast_of is None and not self.parts and self.path:
            return read_values(self.path, self.offset, self.type)
        return np.array(self.read())

    def __repr__(self) -> str:
        return f"<Tensor {self.type}>"

    def flat(self) -> Callable[[int, int], np.ndarray]:
        """A function giving elements ``start`` to ``stop`` of the flattened value; only these are read from a file."""
        if self.path and self.array is None:
            return lambda start, stop: self.flat_slice(start, stop).numpy()
        whole = self.read().reshape(-1)
        return lambda start, stop: whole[start:stop]

    def flat_slice(self, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, which must be in memory, as a view, or stored
        in a file, without reading."""
        type = TensorType(self.type.dtype, (stop - start,))
        if self.array is not None:
            return Tensor(type, array=self.array.reshape(-1)[start:stop])
        return Tensor(type, path=self.path, offset=self.offset + nbytes(type.dtype, start))
