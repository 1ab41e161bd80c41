"""Notices at once the end of another process of this host: the process's endpoints are lost then.

Signs of life through MPI show the same for processes of other hosts, after the timeout.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence

from gopt.runtime.engines.launcher_folder import how_it_died
from gopt.runtime.engines.rank_status import ENDED, REPORTED, RankStatus
from gopt.runtime.messages.hub import Hub

GONE = "its process was killed, or ended without a message"
_LOOK = 0.1
"""Seconds between two looks."""


def watch_peers(hub: Hub, process: int, statuses: Callable[[], Sequence[RankStatus]]) -> Callable[[], None]:
    """Begin to watch; returns a function that ends the watch. ``statuses``: the last status of all readable
    processes."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(hub, process, statuses, over), name="peers", daemon=True).start()
    return over.set


def _watch(
    hub: Hub, process: int, statuses: Callable[[], Sequence[RankStatus]], over: threading.Event
) -> None:  # fmt: skip
    handles: dict[int, int] = {}
    watched: set[int] = {process}
    everyone = set(hub.roster.processes)
    try:
        while not over.is_set() and (handles or watched < everyone):
            for status in statuses():
                if status.rank not in watched and status.process:
                    watched.add(status.rank)
                    handles[status.rank] = _handle(status.process)
            for rank in [rank for rank, handle in handles.items() if _ended(handle)]:
                time.sleep(_LOOK)  # what it said last may not be there yet
                _close(handles.pop(rank))
                how = next((status.how for status in statuses() if status.rank == rank), None)
                if how not in (ENDED, REPORTED):
                    died = how_it_died(rank)
                    for number in hub.roster.local(rank):
                        hub.lose(number, f"its process {died}" if died else GONE)
            over.wait(_LOOK)
    except OSError:  # the system gives no handle, or what others said is gone: signs of life are left
        return
    finally:
        for handle in handles.values():
            _close(handle)


def _handle(process: int) -> int:
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return -1


def _ended(handle: int) -> bool:
    return handle < 0 or bool(select.select([handle], [], [], 0)[0])


def _close(handle: int) -> None:
    if handle >= 0:
        os.close(handle)
