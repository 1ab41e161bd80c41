"""A look-out for what takes too long: a blocking call cannot be left by itself, so the whole job ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable


class Watch:
    """Ends the job when one wait takes longer than ``deadline`` seconds.

    ``explain`` is told what was waited for, then ``end`` is called, on a thread of the watch.
    """

    def __init__(self, deadline: float, explain: Callable[[str], None], end: Callable[[], None]) -> None:
        self._deadline, self._explain, self._end = deadline, explain, end
        self._what: str | Callable[[], str] = ""
        self._since = 0.0
        threading.Thread(target=self._live, name="watch", daemon=True).start()

    def on(self, what: str | Callable[[], str]) -> Watch:
        """Watch over what runs inside ``with``; ``what`` is its name, or finds it when the time is up."""
        self._what = what
        return self

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = 0.0

    def _live(self) -> None:
        while True:
            time.sleep(min(self._deadline / 4, 1.0))
            since = self._since
            if since and time.monotonic() - since > self._deadline:
                what = self._what if isinstance(self._what, str) else self._what()
                self._explain(f"after {self._deadline:g} s, it still waits at {what}: another rank did not come")
                sys.stderr.flush()
                self._end()
