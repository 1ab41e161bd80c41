"""Locks that end with their process: ``flock`` on an open file or folder."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from enum import Enum
from pathlib import Path


class LockState(Enum):
    """How it went."""

    MINE = 1
    BUSY = 2
    """Another open file has the lock."""
    UNKNOWN = 3
    """The file system knows no locks."""


def try_lock(number: int, how: int = fcntl.LOCK_EX) -> LockState:
    """Lock an open file, at once or not at all; closing it, or the end of the process, sets it free."""
    try:
        fcntl.flock(number, how | fcntl.LOCK_NB)
    except OSError as error:
        return LockState.BUSY if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else LockState.UNKNOWN
    return LockState.MINE


def lock_existing(path: Path) -> tuple[int, LockState] | None:
    """Open and lock what lies under a name, and follow no link; None where it is gone.

    Raises OSError. The caller closes the number, which sets it free.
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    taken = try_lock(number)
    if not _is_at(number, path):  # moved or removed before it was locked
        os.close(number)
        return None
    return number, taken


def is_locked(path: Path) -> bool:
    """Whether another process has the lock of a file; False where there is no such file, or no locks."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return try_lock(number, fcntl.LOCK_SH) is LockState.BUSY  # shared: those who only look do not meet
    finally:
        os.close(number)


def lock_file(path: Path) -> int | None:
    """Lock a file that is made where it is missing, and that stays; None when another process has the lock.

    Raises OSError, also for a link and what is no file. The caller closes the number, which sets it free.
    """
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "is no file", str(path))
    if try_lock(number) is LockState.BUSY:
        os.close(number)
        return None
    return number


def _is_at(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), os.lstat(path))
    except FileNotFoundError:
        return False
