"""Heartbeats: each rank of a job publishes its position, so that others can name a rank that died or did not arrive.

Under ``--launch`` ranks write files in the launcher's folder, one each. Under a user's own launcher ranks write to
unnamed memory files (memfd), opened by the other ranks of the host through ``/proc``; no file stays behind."""

from __future__ import annotations

import io
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from gopt.errors import RunError
from gopt.runtime.engines.launcher_folder import (
    ERROR_CLAIMED,
    ERROR_TEXT,
    is_alive,
    launcher_folder,
    read_claim,
    read_marker,
    remove_folder,
    start_of,
)
from gopt.runtime.engines.rank_status import RECORD, REPORTED, RUNNING, WAITING, RankStatus, missing, read, read_status
from gopt.runtime.engines.watchdog import Watchdog

ERROR_GRACE = 1.0
"""Seconds that the others leave to a rank that is about to create that file."""
_PASSING = 0.1
"""Seconds that a user's own launcher has to take what a rank prints, before the rank ends the job."""
_EXPLAINS = 60.0
"""Seconds that the others leave to that rank to report; on a busy machine it takes long to be scheduled."""


class StatusPublisher:
    """Publishes a rank's position; a call costs a small write to memory at the beginning and at the end.

    ``number``: the open file read by others, or None. ``folder``: the launcher's folder."""

    def __init__(self, number: int | None, folder: Path | None) -> None:
        self.folder = folder
        self.step, self.call = 0, -1
        self.others: Callable[[], list[RankStatus]] = lambda: []
        """Returns the last status of all visible ranks."""
        self._process = os.getpid()
        self._record: Any = bytearray(RECORD.size)
        self.at(0, -1)
        if number is not None:
            # Whole at once: others may read it now. By write, as a full disk would be a signal on a write to memory.
            os.pwrite(number, self._record, 0)
            self._record = mmap.mmap(number, RECORD.size)

    @classmethod
    def open(cls, rank: int, gather: Callable[[Any], list[Any]]) -> StatusPublisher:
        """Open a rank's heartbeat. ``gather``: returns the item of every rank of the job; all ranks call it."""
        home = launcher_folder()
        if home is None:
            return cls._in_memory(rank, gather)
        beat = cls(os.open(home / f"{rank}", os.O_RDWR | os.O_CREAT, 0o600), home)
        beat.others = lambda: read(home)
        threading.Thread(target=beat.follow, name="launcher", daemon=True).start()
        return beat

    @classmethod
    def _in_memory(cls, rank: int, gather: Callable[[Any], list[Any]]) -> StatusPublisher:
        try:
            number = os.memfd_create("gopt-beat")
        except (AttributeError, OSError):  # not on this system; not enough files
            gather(None)
            return cls(None, None)
        beat = cls(number, None)
        offers = gather((os.getpid(), number, os.uname().nodename))
        near = {
            rank: f"/proc/{offer[0]}/fd/{offer[1]}"
            for rank, offer in enumerate(offers) if offer is not None and offer[2] == os.uname().nodename
        }  # fmt: skip
        beat.others = lambda: [*filter(None, (read_status(rank, Path(path)) for rank, path in near.items()))]
        return beat

    def follow(self) -> None:
        """End this rank when the launcher has ended: a killed launcher cannot end its ranks."""
        assert self.folder is not None
        launcher = read_marker(self.folder)
        if launcher is not None:
            try:
                handle = os.pidfd_open(launcher.process)
            except ProcessLookupError:
                pass  # gone already, and perhaps its folder with it
            except OSError:
                return  # the system gives no handle: nothing to follow
            else:
                if start_of(launcher.process) == launcher.start:
                    select.select([handle], [], [])
        remove_folder(self.folder)
        os._exit(RunError("").exit_code)

    def at(self, step: int, call: int, how: int = RUNNING) -> None:
        self.step, self.call = step, call
        RECORD.pack_into(self._record, 0, self._process, step, call, how, time.time())

    def waits(self, waiting: bool) -> None:
        """Record that the rank begins or ends a wait for others."""
        self.at(self.step, self.call, WAITING if waiting else RUNNING)

    def first(self, code: int) -> bool:
        """Return whether this rank is the first to report why the job ends; only the first reports, and sets the
        exit code."""
        if self.folder is None:
            return True
        claim = self.folder / f"{ERROR_CLAIMED}.{self._process}"
        try:
            claim.write_text(f"{code} {self._process}")
            os.link(claim, self.folder / ERROR_CLAIMED)  # whole from the first moment on
        except FileExistsError:
            return False
        except OSError:  # the launcher is gone, and its folder
            return True
        return True

    def report(self, code: int, explain: Callable[[], object]) -> None:
        """Publish this rank's failure, once the end of the job is explained: by ``explain``, or by the rank that failed
        first.

        The caller ends the whole job next; an end before the first rank has reported would lose the report."""
        if not self.explain(code, explain):
            self._await_report()
        self.at(self.step, self.call, REPORTED)

    def explain(self, code: int, explain: Callable[[], object]) -> bool:
        """Return whether this rank is the first to report why the job ends; if so, ``explain`` prints the reason on
        stderr, and the job's exit code is ``code``."""
        if not self.first(code):
            return False
        if self.folder is None:
            explain()
            time.sleep(_PASSING)
            return True
        output = io.StringIO()
        with redirect_stderr(output):
            explain()
        try:
            text = self.folder / f"{ERROR_TEXT}.{self._process}"
            text.write_text(output.getvalue(), "utf-8", "backslashreplace")
            text.rename(self.folder / ERROR_TEXT)
        except OSError:  # the launcher is gone, or the disk is full
            sys.stderr.write(output.getvalue())
            sys.stderr.flush()
        return True

    def _await_report(self) -> None:
        """Wait until the first rank has reported, or is gone."""
        assert self.folder is not None  # else this rank is the first
        limit = time.monotonic() + _EXPLAINS
        while time.monotonic() < limit:
            claim = read_claim(self.folder)
            if claim is None or claim.process == self._process or not is_alive(claim.process):
                return
            if any(status.how == REPORTED for status in self.others() if status.process == claim.process):
                return
            time.sleep(0.05)


def follow(watchdog: Watchdog, beat: StatusPublisher, rank: int) -> None:
    """Publish a rank's waits, and give its watchdog the waits of other ranks."""
    watchdog.waits = beat.waits
    watchdog.missing = lambda: missing(beat.others(), rank)
