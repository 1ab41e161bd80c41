"""Reads values of a file into memory: the only place in gopt. A file truncated meanwhile gives an error with the file's
name; with a mapped file, the system would end the process by SIGBUS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from gopt.errors import RunError
from gopt.ir.types import TensorType, numpy_dtype
from gopt.text.sanitize import show_path


def read_values(path: str, offset: int, type: TensorType) -> np.ndarray:
    """A new array of a type from the bytes of a file. Raises RunError for a failed read."""
    array = np.empty(type.dims, numpy_dtype(type.dtype))
    if array.size:
        with _opened(path) as number:
            fill(number, path, offset, array.reshape(-1).view(np.uint8))
    return array


def read_chunks(path: str, offset: int, nbytes: int, size: int) -> Iterator[memoryview]:
    """Bytes of a file in order, at most ``size`` at once, each in memory of its own. Raises RunError as above."""
    if not nbytes:
        return
    with _opened(path) as number:
        for start in range(0, nbytes, size):
            chunk = np.empty(min(size, nbytes - start), np.uint8)
            fill(number, path, offset + start, chunk)
            yield chunk.data


@contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RunError(f"{show_path(path)} cannot be read any more: {error.strerror}") from error
    try:
        yield number
    finally:
        os.close(number)


def fill(number: int, path: str, offset: int, memory: np.ndarray) -> None:
    """Fill bytes of memory from an open file. Raises RunError, which names the file, where it ends early or fails."""
    rest = memory.data
    while rest:
        try:
            count = os.preadv(number, [rest], offset)
        except OSError as error:
            raise RunError(f"{show_path(path)} cannot be read: {error.strerror}") from error
        if not count:
            size, needed = os.fstat(number).st_size, offset + len(rest)
            raise RunError(
                f"{show_path(path)} was truncated while it is read: it has {size} bytes, {needed} are needed",
                "leave it as it is until gopt ends; to change it, write a new file and rename it",
            )
        rest, offset = rest[count:], offset + count
