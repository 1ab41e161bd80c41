"""Atomic renames: exchange two names, or take a free name. Elsewhere than on Linux, and on file systems without these,
``exchange`` raises Unsupported."""

from __future__ import annotations

import errno
import os
from functools import cache
from pathlib import Path
from typing import Any

_HERE = -100
"""AT_FDCWD: relative paths are of the current folder."""
_NO_REPLACE, _EXCHANGE = 1, 2
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
"""Error numbers of systems or file systems that do not support the call or the flag."""


class Unsupported(OSError):
    """This file system has no such atomic rename."""


def exchange(one: Path, path: Path) -> None:
    """Exchange the names of two files or folders atomically; raises OSError, for instance Unsupported."""
    _rename(one, path, _EXCHANGE)


def rename_noreplace(staged: Path, target: Path) -> None:
    """Rename a file or folder to a free name; raises FileExistsError where the name is taken, OSError."""
    try:
        _rename(staged, target, _NO_REPLACE)
    except Unsupported:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        os.rename(staged, target)


def _rename(one: Path, path: Path, flag: int) -> None:
    call = renameat2()
    number = errno.ENOSYS if call is None else call(os.fsencode(one), os.fsencode(path), flag)
    if number in _UNKNOWN:
        raise Unsupported(number, os.strerror(number), str(one))
    if number:
        raise OSError(number, os.strerror(number), str(one), None, str(path))


@cache
def renameat2() -> Any:
    """Return the C library's call as a function that returns an error number, or None."""
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]

    def rename(one: bytes, twin: bytes, flag: int) -> int:
        return ctypes.get_errno() if call(_HERE, one, _HERE, twin, flag) else 0

    return rename
