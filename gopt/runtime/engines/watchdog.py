"""Ends the job when a blocking call takes too long. Such a call cannot be interrupted, so the whole process ends."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable


class Watchdog:
    """Ends the job when a wait takes longer than ``deadline`` seconds.

    A thread of the watchdog calls ``explain`` with a description of the wait, then ``end``. The thread ends when the
    watchdog is closed or no longer referenced."""

    def __init__(self, deadline: float, explain: Callable[[str], None], end: Callable[[], None]) -> None:
        self._deadline, self._explain, self._end = deadline, explain, end
        self.waits: Callable[[bool], None] = lambda _: None
        """Hears of the beginning and the end of each wait."""
        self.missing: Callable[[], str] = lambda: "another rank did not reach this call"
        """Describes the ranks that it waits for."""
        self._what: str | Callable[[], str] = ""
        self._since = 0.0
        closed = threading.Event()
        self.close: Callable[[], object] = weakref.finalize(self, closed.set)
        """Look no longer."""
        mine = weakref.ref(self), closed, min(deadline / 4, 1.0)
        threading.Thread(target=_watch_loop, args=mine, name="watch", daemon=True).start()

    def on(self, what: str | Callable[[], str]) -> Watchdog:
        """Watch over the block inside ``with``. ``what``: the block's name, or a function that returns the name when
        the time is up."""
        self._what = what
        return self

    def __enter__(self) -> None:
        self._since = time.monotonic()
        self.waits(True)

    def __exit__(self, *_: object) -> None:
        self._since = 0.0
        self.waits(False)

    def _check_deadline(self) -> None:
        since = self._since
        if since and time.monotonic() - since > self._deadline:
            what = self._what if isinstance(self._what, str) else self._what()
            self._explain(f"after {self._deadline:g} s, it still waits at {what}: {self.missing()}")
            sys.stderr.flush()
            self._end()


def _watch_loop(reference: weakref.ref[Watchdog], closed: threading.Event, period: float) -> None:
    while not closed.wait(period):
        if watchdog := reference():
            watchdog._check_deadline()
        del watchdog  # a thread that held it would keep it alive
