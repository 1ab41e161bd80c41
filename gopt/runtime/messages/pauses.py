"""Pauses of a thread that waits for transfers of MPI: the processor is given away for a moment, then the thread sleeps,
longer each time.

Transfers move on only in calls of both ends, so pauses are short while arrays travel.
"""

from __future__ import annotations

import os
import threading
import time

_YIELDS, _YIELDS_BUSY = 3e-4, 5e-3
"""Seconds for which a wait only gives the processor away, while nothing happens and while arrays travel."""
_FIRST_SLEEP = 2e-5
LAST_SLEEP, BUSY_SLEEP = 1e-3, 1e-4
"""Seconds of the longest sleep: while nothing happens, and while arrays travel."""


class Pauses:
    """The pauses of the waits of one process. All waiting threads hold ``changed`` and release the lock in a pause."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._idle_since = 0.0

    def pause(self, idle: int, remaining: float, busy: bool) -> None:
        """Pause once. ``idle``: how often nothing has happened; ``remaining``: seconds until the wait ends; ``busy``:
        whether arrays travel."""
        now = time.perf_counter()
        if idle == 1:
            self._idle_since = now
        waited, yields = now - self._idle_since, _YIELDS_BUSY if busy else _YIELDS
        if waited < yields:
            self._changed.release()
            try:
                os.sched_yield()
            finally:
                self._changed.acquire()
            return
        longest = BUSY_SLEEP if busy else LAST_SLEEP
        self._changed.wait(min(remaining, longest, (waited - _YIELDS) / 4 + _FIRST_SLEEP))
