"""Where the time of a step goes: from a trace of ``gopt run`` and the notes of ``benchmarks/probe.py``."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Span = tuple[float, float]

_RUN = re.compile(r"(\d+) elementwise over (\d+)")
_UPDATE = 12
"""Nodes from which an elementwise run is an AdamW (14 on rows), and no activation."""
_ROWS = 7
"""Float32 rows of an AdamW: parameter, gradient and two moments read, all but the gradient written."""


@dataclass(frozen=True)
class Shares:
    """Seconds of a step of one rank. ``wall`` is ``compute`` (sessions, runs in tiles), ``exposed`` (calls under way
    while nothing is computed) and ``overhead`` (neither) together; ``loop`` is the overhead between segments, the rest
    of it is their binding. ``update``: of the compute, AdamW in tiles."""

    wall: float
    compute: float
    exposed: float
    overhead: float
    loop: float
    calls: float
    update: float
    update_elements: int


def merged(spans: Sequence[Span]) -> list[Span]:
    """The union of spans, in order, as spans that do not touch."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def covered(union: Sequence[Span], begin: float, end: float) -> float:
    """How much of a stretch a union of spans covers."""
    first = bisect_left(union, begin, key=lambda span: span[1])
    total = 0.0
    for start, stop in union[first:]:
        if start >= end:
            break
        total += min(stop, end) - max(start, begin)
    return total


def shares(events: Sequence[Mapping[str, Any]], notes: Mapping[str, Any], rank: int, skip: int) -> list[Shares]:
    """Every step of a rank from ``skip`` on, but for the last, whose end nobody noted.

    A session counts while it runs, without its binding, and a run in tiles as a whole. Words that ranks exchange
    (the losses at the end of a step) count as calls.
    """
    mine = [event for event in events if event.get("ph") == "X" and event["pid"] == rank]
    runs = [(match, span) for event, span in zip(mine, map(_span, mine)) if (match := _RUN.match(event["name"]))]
    made = [_span(event) for event in mine if event["tid"] == 1] + [tuple(each) for each in notes["agreed"]]
    compute = merged([*(tuple(each) for each in notes["sessions"]), *(span for _, span in runs)])
    calls = merged(made)
    busy = merged([*compute, *calls])
    events_busy = merged([*busy, *map(_span, mine)])
    updates = [(span, int(match[2])) for match, span in runs if int(match[1]) >= _UPDATE]
    found = []
    for begin, end in list(pairwise(notes["steps"]))[skip:]:
        inside = [(span, elements) for span, elements in updates if begin <= span[0] < end]
        work, all_busy = covered(compute, begin, end), covered(busy, begin, end)
        found.append(
            Shares(
                end - begin, work, all_busy - work, end - begin - all_busy,
                end - begin - covered(events_busy, begin, end), covered(calls, begin, end),
                sum(stop - start for (start, stop), _ in inside), sum(elements for _, elements in inside),
            )
        )  # fmt: skip
    return found


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def middle(steps: Sequence[Shares]) -> dict[str, float]:
    """The median of each share, in milliseconds; ``update_ns``: nanoseconds of the update a byte, 0 without one, and
    ``update_min_ns``, of the best step."""
    names = ("wall", "compute", "exposed", "overhead", "loop", "calls", "update")
    row = {name: 1000 * statistics.median(getattr(each, name) for each in steps) for name in names}
    row["overhead_share"] = statistics.median(each.overhead / each.wall for each in steps)
    elements = statistics.median(each.update_elements for each in steps)
    row["update_bytes"] = 4 * _ROWS * elements
    row["update_ns"] = 1e6 * row["update"] / row["update_bytes"] if elements else 0.0
    row["update_min_ns"] = 1e9 * min(each.update for each in steps) / row["update_bytes"] if elements else 0.0
    return row


def ring_bytes(op: str, ranks: int, given: int, made: int) -> float:
    """Bytes a rank sends for a call on a ring, from the bytes handed in and out; the mean where roots differ."""
    whole = {"AllReduce": 2 * given, "ReduceScatter": given, "Reduce": given, "AllGather": made, "Broadcast": made,
             "AllToAll": given}.get(op)  # fmt: skip
    return float(given) if whole is None else (ranks - 1) / ranks * whole


def counted(notes: Mapping[str, Any], skip: int) -> tuple[float, float]:
    """Calls a step, and bytes sent a step on a ring, by what was handed to the engine from step ``skip`` on."""
    begin, end = notes["steps"][skip], notes["steps"][-1]
    steps = len(notes["steps"]) - 1 - skip
    calls = [each for each in notes["calls"] if begin <= each[0] < end]
    return len(calls) / steps, sum(ring_bytes(*each[1:]) for each in calls) / steps
