"""Samples of files whose rows lie one behind the other: each batch reads its own."""

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
    """An array whose first axis counts samples or whole batches: in memory, or in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Array, /) -> Array: ...


class SampleFile:
    """A file that stays open as long as an array of it is in use: one that is replaced by another is read on."""

    def __init__(self, path: str) -> None:
        """Raises RunError where it cannot be opened."""
        self.path = path
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError(f"{show_path(path)} cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self.number)


@dataclass(frozen=True, slots=True)
class FileRows:
    """An array of a file, whose rows are converted to the type ``dtype`` when they are read."""

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
        """The rows of these indices. Raises RunError, which names the file, where they cannot be read."""
        held = TensorType(self.tensor.type.dtype, (len(rows), *self.shape[1:]))
        found = np.empty(held.dims, numpy_dtype(held.dtype))
        width, memory = nbytes(held.dtype, held.elements // max(len(rows), 1)), found.reshape(-1).view(np.uint8)
        starts = np.flatnonzero(np.diff(rows, prepend=rows[:1] - 2) != 1)  # where adjacent rows begin
        for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(rows)]):
            place = self.tensor.offset + int(rows[start]) * width
            fill(self.file.number, self.file.path, place, memory[start * width : stop * width])
        return found if held.dtype == self.dtype else found.astype(numpy_dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Arrays one after another along their first axis; their rows have one type."""

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
            self.parts[each][rows[owners == each] - (ends[each] - len(self.parts[each]))]
            for each in np.unique(owners).tolist()
        ]
        found = np.concatenate(read)
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return np.ascontiguousarray(found[back])
