"""Synchronisation points of endpoints without rounds, at checkpoints and at the end, and the exchanged records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from gopt.runtime.exchanged_values import exchanged
from gopt.runtime.parameter_server.job import EndpointEngine


@exchanged
@dataclass(slots=True)
class Usage:
    """Counts of a server. ``staleness``: number of updates between a trainer's pull and push -> pushes of keys with
    this number. ``dropped``: messages that arrived twice."""

    staleness: Counter[int] = field(default_factory=Counter)
    accepted: int = 0
    dropped: int = 0
    skipped: int = 0
    """Messages that were not applied, because a value was not a number."""
    answered: int = 0

    def __add__(self, usage: Usage) -> Usage:
        return Usage(
            self.staleness + usage.staleness, self.accepted + usage.accepted, self.dropped + usage.dropped,
            self.skipped + usage.skipped, self.answered + usage.answered,
        )  # fmt: skip


@exchanged
@dataclass(frozen=True, slots=True)
class SyncReport:
    """The report of an endpoint at a synchronisation point, and the combined report of all.

    ``step``: the furthest step. ``leaving``: an endpoint stops, so all end. ``signal``: the signal for the stop, or 0.
    ``spread``: the largest difference between versions of keys in one step's pulls."""

    step: int = 0
    leaving: bool = False
    signal: int = 0
    spread: int = 0
    exhausted: bool = False
    """It has no more data; or all have none."""
    usage: Usage = field(default_factory=Usage)
    """Of all servers, since the start of the run."""

    def __str__(self) -> str:
        late = ", ".join(f"{count} by {updates}" for updates, count in sorted(self.usage.staleness.items()))
        dropped = f"; {self.usage.dropped} messages came twice" if self.usage.dropped else ""
        dropped += f"; {self.usage.skipped} messages were not applied" if self.usage.skipped else ""
        return f"updates by which pushes were late: {late}; versions in one pull differed by {self.spread}{dropped}"


def synchronise(engine: EndpointEngine, mine: SyncReport | Usage) -> SyncReport:
    """Synchronise, and return the combined report. All endpoints call this function, at the same steps; a lost trainer
    reports nothing."""
    reports = engine.gather(mine)
    trainers = [report for report in reports if isinstance(report, SyncReport)]
    servers = [report for report in reports if isinstance(report, Usage)]
    exhausted = all(trainer.exhausted for trainer in trainers)
    return SyncReport(
        max((trainer.step for trainer in trainers), default=0),
        exhausted or any(trainer.leaving for trainer in trainers),
        next((trainer.signal for trainer in trainers if trainer.signal), 0),
        max((trainer.spread for trainer in trainers), default=0),
        exhausted,
        sum(servers, Usage()),
    )
