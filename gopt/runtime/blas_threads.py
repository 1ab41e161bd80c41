"""NumPy's products on one thread: waiting threads spin, and cost several times their saving on a busy machine."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads", "openblas_{}_num_threads64_",
          "openblas_{}_num_threads")  # fmt: skip
_lock = threading.Lock()
_inside: list[int] = []
"""The number of threads to go back to, once for each block that is open."""


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let the products of a block, of all threads, run on one thread each; no effect with another library behind
    NumPy."""
    calls = _library()
    if calls is None:
        yield
        return
    get, set_ = calls
    with _lock:
        _inside.append(_inside[0] if _inside else get())
        set_(1)
    try:
        yield
    finally:
        with _lock:
            before = _inside.pop()
            if not _inside:
                set_(before)


@functools.cache
def _library() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """The functions for reading and setting the number of threads of the OpenBLAS in NumPy's wheel."""
    root = Path(np.__file__).parent
    for path in sorted([*root.parent.glob("numpy.libs/*openblas*"), *root.glob(".dylibs/*openblas*")]):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for name in _NAMES:
            get, set_ = (getattr(library, name.format(word), None) for word in ("get", "set"))
            if get is not None and set_ is not None:
                get.argtypes, get.restype, set_.argtypes, set_.restype = [], ctypes.c_int, [ctypes.c_int], None
                return get, set_
    return None
