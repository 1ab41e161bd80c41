"""Samples of files with rows one behind the other: each batch reads its rows alone."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gopt.errors import RunError
from gopt.ir.file_reads import fill
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, nbytes, numpy_dtype
from gopt.runtime.session import Array
from gopt.text.sanitize import show_path


class Samples(Protocol):
    """An array in memory or in a file; the first axis counts samples or whole batches."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Array, /) -> Array: ...


class SampleFile:
    """A file that stays open while an array of it is in use: after a replacement the old file is read on."""

    def __init__(self, path: str) -> None:
        """Raises RunError for a file that cannot be opened."""
        self.path = path
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(f"{show_path(path)} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self.number)


@dataclass(frozen=True, slots=True)
class FileRows:
    """An array of a file; rows are converted to the type ``dtype`` when read."""

    file: SampleFile
    tensor: Tensor
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        dims: tuple[int, ...] = self.tensor.type.dims
        return dims

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Array, /) -> Array:
        """The rows of these indices. Raises RunError with the file's name where rows cannot be read."""
        stored = TensorType(self.tensor.type.dtype, (len(rows), *self.shape[1:]))
        buffer = np.empty(stored.dims, numpy_dtype(stored.dtype))
        width, memory = nbytes(stored.dtype, stored.elements // max(len(rows), 1)), buffer.reshape(-1).view(np.uint8)
        starts = np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) != 1)  # where adjacent rows begin
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)]):
            offset = self.tensor.offset + int(rows[start]) * width
            fill(self.file.number, self.file.path, offset, memory[start * width : stop * width])
        return buffer if stored.dtype == self.dtype else buffer.astype(numpy_dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Arrays one after another along the first axis; all rows have one type."""

    parts: tuple[Samples, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.parts)), *self.parts[0].shape[1:])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Array, /) -> Array:
        """The rows of these indices; each part is read once."""
        ends = np.cumsum([len(part) for part in self.parts])
        owners = np.searchsorted(ends, rows, side="right")
        order = np.argsort(owners, kind="stable")
        read = [
            self.parts[part][rows[owners == part] - (ends[part] - len(self.parts[part]))]
            for part in np.unique(owners).tolist()
        ]
        joined = np.concatenate(read)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return np.ascontiguousarray(joined[back])
