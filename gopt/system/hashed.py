"""The SHA-256 and the size of written data, taken during the write, so that nothing is read a second time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gopt.system.files import create

BESIDE = 1 << 20
"""Pieces of at least so many bytes are hashed while they are written."""


class HashedFile:
    """An open file to write, with counted and hashed bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._seen = file, hashlib.sha256()
        self._beside: ThreadPoolExecutor | None = None
        self.nbytes = 0

    @property
    def sha256(self) -> str:
        """The digest of all bytes written so far, in hexadecimal."""
        return self._seen.hexdigest()

    def write(self, data: bytes | memoryview) -> int:
        """Write and hash a buffer; returns the number of bytes. Raises OSError."""
        self.nbytes += len(data)
        if len(data) < BESIDE:
            self._seen.update(data)
            return self._file.write(data)
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1)
        hashed = self._beside.submit(self._seen.update, data)
        try:
            return self._file.write(data)
        finally:
            hashed.result()

    def writelines(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Write all buffers; raises OSError."""
        for piece in pieces:
            self.write(piece)

    def close(self) -> None:
        """End the hashing thread; the file itself stays open."""
        if self._beside is not None:
            self._beside.shutdown()


@contextmanager
def hashed(file: BinaryIO) -> Iterator[HashedFile]:
    """Hash the writes to an open file in the block."""
    result = HashedFile(file)
    try:
        yield result
    finally:
        result.close()


@contextmanager
def create_hashed(path: Path) -> Iterator[HashedFile]:
    """A new file to write, with a hash; raises as ``create``."""
    with create(path) as file, hashed(file) as result:
        yield result
