"""When Python's garbage collection is worth its time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_KEPT: list[object] = []


def free_at_exit(*objects: object) -> None:
    """Keep what a command has made until the process ends or the next command does the same: to free many small objects
    takes as long as a sweep over them."""
    _KEPT[:] = objects


@contextmanager
def gc_paused() -> Iterator[None]:
    """No garbage collection while many small objects are made that are all alive: walking them finds nothing, and at
    100,000 nodes takes a fifth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
