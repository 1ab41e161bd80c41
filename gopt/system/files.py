"""New files: created exclusively, never through a link, and synced to disk."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, cast

from gopt.text.sanitize import show

BUFFER = 1 << 20
"""Bytes that are gathered before they are written."""
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of file systems that cannot sync folders."""


class _Raw(io.RawIOBase):
    """An open file, written by ``os.write``: every write of gopt passes functions of ``os`` replaceable in tests."""

    def __init__(self, number: int) -> None:
        self._number = number

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return os.write(self._number, data)

    def tell(self) -> int:
        return os.lseek(self._number, 0, os.SEEK_CUR)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._number)


@contextmanager
def writer(number: int) -> Iterator[BinaryIO]:
    """An open file to write, through a buffer; closed at the end. Raises OSError."""
    with io.BufferedWriter(_Raw(number), BUFFER) as file:
        yield cast("BinaryIO", file)


@contextmanager
def create(path: Path) -> Iterator[BinaryIO]:
    """A new file to write, with the mode left by the umask.

    Raises FileExistsError rather than write over a file or through a link, OSError for an unwritable file."""
    with writer(os.open(path, NEW, 0o666)) as file:
        yield file


def write_new(path: Path, data: bytes) -> None:
    """A new file with this content; raises as ``create``."""
    with create(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk; raises OSError."""
    number = os.open(path, _OLD)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NO_SYNC or not stat.S_ISDIR(os.fstat(number).st_mode):
            raise
    finally:
        os.close(number)


def sync_folder(folder: Path) -> None:
    """Sync all files of a folder, and the names, to disk; raises OSError.

    At the end rather than file by file: the first sync lets the system write all files."""
    for path in sorted(folder.iterdir()):
        sync(path)
    sync(folder)


def make_folders(path: Path) -> None:
    """Create a folder and missing parents; raises OSError, NotADirectoryError for a parent that is a file."""
    missing = list(takewhile(lambda item: not item.exists(), (path, *path.parents)))
    nearest = missing[-1].parent if missing else path
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{show(os.fspath(nearest))} is a file, not a folder", str(path))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def is_regular_file(path: Path) -> bool:
    """Return whether this is a regular file, not a link to one."""
    with suppress(OSError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def remove(path: Path) -> None:
    """Remove a file or a folder, as much as possible; a link is removed, not the target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():  # rmtree opens each folder twice: where descriptors are short, it removes nothing
            _remove_files(path)
    else:
        with suppress(OSError):
            path.unlink()


def _remove_files(folder: Path) -> None:
    """Remove the files of a folder, with one descriptor, and the folder if left empty."""
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError):
                os.unlink(folder / name)
        os.rmdir(folder)


def reason(error: OSError) -> str:
    """Return a short reason why a write failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    if error.errno == errno.EMFILE:
        return "too many files are open (ulimit -n)"
    return error.strerror or str(error)


def digest_of(path: Path) -> bytes:
    """SHA-256 of a file's content, read in blocks. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
