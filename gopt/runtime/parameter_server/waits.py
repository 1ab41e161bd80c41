"""A server's waits for trainers, and counts of a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gopt.runtime.exchanged_values import exchanged

ENOUGH = 10
"""Rounds after which a trainer may be called a straggler."""
SHARE = 0.8
"""Of these rounds: in how many it came last."""


@dataclass(slots=True)
class Waits:
    """Seconds of a server's wait for each trainer while another had arrived, and how often each arrived last.

    Before the first arrival, all compute, and no trainer is waited for. ``clock``: returns seconds."""

    clock: Callable[[], float] = time.perf_counter
    seconds: dict[int, float] = field(default_factory=dict)
    last: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    _round: dict[int, float] = field(default_factory=dict)

    def add(self, missing: Sequence[int], live: int, begun: float) -> None:
        """Record a wait since ``begun``: the trainers in ``missing``, of all ``live`` trainers, had not arrived."""
        if len(missing) < live:
            spent = self.clock() - begun
            for trainer in missing:
                self._round[trainer] = self._round.get(trainer, 0.0) + spent

    def end_round(self) -> None:
        """Count the trainer with the longest wait as the last of the round."""
        self.rounds += 1
        if self._round:
            self.last[max(self._round, key=lambda trainer: self._round[trainer])] += 1
        for trainer, spent in self._round.items():
            self.seconds[trainer] = self.seconds.get(trainer, 0.0) + spent
        self._round.clear()


@exchanged
@dataclass(frozen=True, slots=True)
class ServerSummary:
    """Waits and counts of a server. ``waits``: trainer -> seconds waited for the trainer while another had arrived.
    ``last``: trainer -> rounds with this trainer last."""

    server: int
    rounds: int
    answered: int
    bytes_in: int
    bytes_out: int
    dropped: int
    waits: Mapping[int, float]
    last: Mapping[int, int]
    skipped: int = 0
    """Rounds that were not applied."""

    def to_json(self) -> dict[str, Any]:
        return {
            "server": self.server, "rounds": self.rounds, "answered": self.answered, "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out, "dropped": self.dropped, "skipped": self.skipped,
            "waits": {str(trainer): round(spent, 6) for trainer, spent in sorted(self.waits.items())},
            "last": {str(trainer): count for trainer, count in sorted(self.last.items())},
        }  # fmt: skip


def straggler(summaries: Sequence[ServerSummary]) -> str:
    """A line with the trainer for which a server waited in nearly every round, or ''."""
    waits = [
        (summary.waits.get(trainer, 0.0), trainer, count, summary)
        for summary in summaries for trainer, count in summary.last.items()
        if summary.rounds >= ENOUGH and count >= SHARE * summary.rounds
    ]  # fmt: skip
    if not waits:
        return ""
    spent, trainer, count, slowest = max(waits, key=lambda item: item[0])
    return (
        f"trainer {trainer} came last in {count} of {slowest.rounds} rounds: server {slowest.server} waited "
        f"{spent:.3g} s for it while others had come"
    )
