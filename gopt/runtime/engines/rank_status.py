"""The positions that ranks publish, and in words on which ranks a rank waits."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gopt.runtime.engines.launcher_folder import (
    is_stopped,
)
from gopt.text.amounts import rank_ranges

RECORD = struct.Struct("<qqqqd")
"""Process number, step, call, how it goes, seconds since the epoch."""
RUNNING, ENDED, REPORTED, WAITING = 0, 1, 2, 3
"""Status of a rank: running; ended well; reported an error; waiting for others in a call."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The last published status of a rank."""

    rank: int
    process: int
    step: int
    call: int
    how: int
    when: float

    @property
    def where(self) -> str:
        call = f", call {self.call}" if self.call >= 0 else ""
        return f"step {self.step + 1}{call}"


def read(folder: Path) -> list[RankStatus]:
    """Return the last status of every rank, from a launcher's folder."""
    ranks = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    return [*filter(None, (read_status(rank, folder / f"{rank}") for rank in ranks))]


def read_status(rank: int, path: Path) -> RankStatus | None:
    with suppress(OSError):
        data = path.read_bytes()
        if len(data) == RECORD.size:
            return RankStatus(rank, *RECORD.unpack(data))
    return None


def missing(statuses: Sequence[RankStatus], rank: int) -> str:
    """Name the ranks on which rank ``rank`` waits: ranks that wait for no other rank, or are stopped.

    A rank that waits for such a rank is not named."""
    peers = [status for status in statuses if status.rank != rank]
    stopped = {peer.rank for peer in peers if is_stopped(peer.process)}
    late = [peer for peer in peers if peer.how != WAITING or peer.rank in stopped]
    if not late:
        return _all_wait(statuses, rank)
    one = late[0] if len(late) == 1 else None
    if one is None:
        return f"ranks {_some([status.rank for status in late])} did not reach this call"
    if one.rank in stopped:
        return f"rank {one.rank} did not reach this call: its process is stopped, in {one.where}"
    return f"rank {one.rank} did not reach this call: " + (
        "it has ended" if one.how != RUNNING else f"it is in {one.where}"
    )


def _all_wait(statuses: Sequence[RankStatus], rank: int) -> str:
    """Describe a deadlock, in which all ranks wait: name the least advanced ranks."""
    mine = [status for status in statuses if status.rank == rank]
    behind = [status for status in statuses if mine and (status.step, status.call) < (mine[0].step, mine[0].call)]
    if not behind:
        return "another rank did not reach this call"
    least = min(behind, key=lambda status: (status.step, status.call))
    return f"another rank did not reach this call: rank {least.rank} still waits in {least.where}"


def waiting(statuses: Iterable[RankStatus], dead: int) -> str:
    """Where the other ranks waited when a rank died, such as ``; rank 0 waited in call 1``."""
    calls: dict[int, list[int]] = {}
    for status in statuses:
        if status.how == WAITING and status.rank != dead and status.call >= 0:
            calls.setdefault(status.call, []).append(status.rank)
    clauses = [f"; rank{'s' * (len(ranks) > 1)} {_some(ranks)} waited in call {call}" for call, ranks in calls.items()]
    return "".join(clauses[:3])


def _some(ranks: Sequence[int]) -> str:
    text = rank_ranges(sorted(ranks))
    return text if len(text) <= 60 else f"{text[:60].rpartition(',')[0]} and others"
