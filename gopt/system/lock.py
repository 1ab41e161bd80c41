"""Locks that end with the process: ``flock`` on an open file or folder."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from enum import Enum
from pathlib import Path


class LockState(Enum):
    """The outcome of an attempt to lock."""

    MINE = 1
    BUSY = 2
    """Another open file has the lock."""
    UNKNOWN = 3
    """The file system knows no locks."""


def try_lock(number: int, how: int = fcntl.LOCK_EX) -> LockState:
    """Try to lock an open file without waiting; closing the file, or the end of the process, releases the lock."""
    try:
        fcntl.flock(number, how | fcntl.LOCK_NB)
    except OSError as error:
        return LockState.BUSY if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else LockState.UNKNOWN
    return LockState.MINE


def lock_existing(path: Path) -> tuple[int, LockState] | None:
    """Open and lock a file or folder without following links; None for a missing path.

    Raises OSError. The caller closes the descriptor and so releases the lock."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    lock = try_lock(number)
    if not is_at(number, path):  # moved or removed before it was locked
        os.close(number)
        return None
    return number, lock


def is_locked(path: Path) -> bool:
    """Return whether another process has the lock of a file; False where there is no such file, or no locks."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return try_lock(number, fcntl.LOCK_SH) is LockState.BUSY  # shared: readers do not exclude each other
    finally:
        os.close(number)


def lock_file(path: Path) -> int | None:
    """Lock a file, created if missing and kept; None when another process has the lock.

    Raises OSError, also for a link and anything but a file. Closing the descriptor, as callers must, releases the lock.
    """
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    busy = try_lock(number) is LockState.BUSY
    if not busy and is_at(number, path):
        return number
    os.close(number)
    return None if busy else lock_file(path)  # a job that could write nothing removed it


def is_at(number: int, path: Path) -> bool:
    """Return whether an open file is still at a path."""
    try:
        return os.path.samestat(os.fstat(number), os.lstat(path))
    except FileNotFoundError:
        return False
