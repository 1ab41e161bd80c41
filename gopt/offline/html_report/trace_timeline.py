"""The step as a timeline of compute and calls, measured by ``gopt run --trace``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gopt import documents
from gopt.documents.records import from_document
from gopt.documents.trace_record import TraceEvent, TraceFile
from gopt.errors import InputError
from gopt.offline.html_report.record import Span, Timeline

SPANS = 4000
"""Spans of a timeline at most."""
RANKS = 8
"""Ranks that are drawn at most."""
_LANES = ("compute", "calls")
_FIRST_CALL = re.compile(r"\w+ 0 over ")


@dataclass(frozen=True, slots=True)
class _Event:
    """One event; times in microseconds from the first event."""

    rank: int
    lane: int
    name: str
    begin: float
    end: float


def trace_timeline(path: Path, total_ranks: int, wanted: Sequence[int]) -> Timeline:
    """The last events of some ranks of a trace, the last step in focus.

    ``wanted``: the ranks to draw first where there are more than ``RANKS``.
    Raises InputError where the file is not a trace of so many ranks.
    """
    events = _events(from_document(TraceFile, documents.read_json(path, documents.TRACE)).events)
    if not events:
        raise InputError(f"{path} has no events", "write it with gopt run DIR --trace FILE")
    present = {event.rank for event in events}
    if max(present) >= total_ranks:
        raise InputError(
            f"{path} is of another folder: it has rank {max(present)}, the folder {total_ranks} ranks",
            "write it with gopt run DIR --trace FILE",
        )
    ranks = sorted(present) if len(present) <= RANKS else _drawn(present, wanted)
    mine = [event for event in events if event.rank in ranks]
    shown = mine[-SPANS:]
    zero = min(event.begin for event in shown)
    spans = tuple(_span(event, ranks, zero) for event in shown)
    drawn = "every rank" if len(ranks) == len(present) else f"{len(ranks)} of {len(present)} ranks"
    note = f"measured by {path.name}, of {drawn}; a call's time includes the wait for other ranks."
    lanes = tuple(f"rank {rank} {lane}" for rank in ranks for lane in _LANES)
    return Timeline("trace", "ms", note, lanes, spans, _focus(spans), len(mine) - len(shown))


def _drawn(present: set[int], wanted: Sequence[int]) -> list[int]:
    """The wanted ranks, then the first others, as many as are drawn."""
    chosen = dict.fromkeys([*(rank for rank in wanted if rank in present), *sorted(present)])
    return sorted(list(chosen)[:RANKS])


def _events(rows: Sequence[TraceEvent]) -> list[_Event]:
    events = [
        _Event(row.pid, row.tid, row.name, row.ts, row.ts + row.dur)
        for row in rows
        if row.ph == "X" and row.ts is not None and row.dur is not None and row.tid in (0, 1)
    ]
    return sorted(events, key=lambda event: event.begin)


def _span(event: _Event, ranks: Sequence[int], zero: float) -> Span:
    kind = event.name.split(" ")[0] if event.lane else "compute"
    lane = ranks.index(event.rank) * len(_LANES) + event.lane
    return Span(lane, kind, event.name, _ms(event.begin - zero), _ms(event.end - zero))


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 4)


def _focus(spans: Sequence[Span]) -> tuple[float, float]:
    """The last step: from the compute before its first call; all spans if no call tells of steps."""
    end = max(span.end for span in spans)
    firsts = [span for span in spans if span.lane == 1 and _FIRST_CALL.match(span.name)]
    if not firsts:
        return 0, end
    start = firsts[-1].start
    before = [span.start for span in spans if span.lane == 0 and span.end <= start]
    return max(before, default=0), end
