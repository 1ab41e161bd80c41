"""Signs of life between MPI processes: empty messages with a separate tag, sent every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gopt.runtime.messages.roster import Settings


class Heartbeat:
    """The last sign of each process of a job, and the processes silent for too long.

    ``processes``: the count of processes; ``number``: the number of this process; ``tag``: the tag of the signs."""

    def __init__(self, mpi: Any, comm: Any, processes: int, number: int, tag: int, settings: Settings) -> None:
        self._mpi, self._comm, self._tag = mpi, comm, tag
        self._every, self._timeout = settings.heartbeat, settings.heartbeat_timeout
        self.others = tuple(process for process in range(processes) if process != number)
        self._heard = dict.fromkeys(range(processes), time.monotonic())
        self._sent: dict[int, Any] = {}
        """Process -> the request of the last sign sent to it."""
        self._last = 0.0
        self._status: Any = mpi.Status()

    def heard(self, process: int) -> None:
        """Something has come from a process: every message is a sign of life."""
        self._heard[process] = time.monotonic()

    def seconds_silent(self, process: int) -> float:
        """Return how long nothing has come from a process."""
        return time.monotonic() - self._heard[process]

    def beat(self, gone: Callable[[int], bool]) -> list[int]:
        """Receive signs and, when due, send a sign to each process that is not ``gone``. Return the processes silent
        for longer than the timeout."""
        if not self._every:
            return []
        while (sign := self._comm.Improbe(self._mpi.ANY_SOURCE, self._tag, self._status)) is not None:
            self.heard(self._status.Get_source())
            sign.Recv([bytearray(), self._mpi.BYTE])
        now = time.monotonic()
        if now - self._last < self._every:
            return []
        late = now - self._last > self._timeout and self._last > 0
        self._last = now
        silent = []
        for process in self.others:
            if gone(process):
                continue
            if late:  # this process itself stood still: it has looked at nothing meanwhile
                self._heard[process] = now
            if now - self._heard[process] > self._timeout:
                silent.append(process)
            else:
                self._send(process)
        return silent

    def _send(self, process: int) -> None:
        """Send a sign, unless the last sign is still under way."""
        with suppress(self._mpi.Exception):  # the process is gone, then: its silence will say so
            if process not in self._sent or self._sent[process].Test():
                self._sent[process] = self._comm.Issend([b"", self._mpi.BYTE], process, self._tag)
