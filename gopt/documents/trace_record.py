"""The trace of a run as a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gopt.documents.records import OPTIONAL, Amount, Count, Open, key


@dataclass(frozen=True, slots=True)
class TraceEvent(Open):
    """The name of a line, or an event."""

    name: str
    """The name is `process_name` or `thread_name` for a line, else the work of the rank."""
    ph: str
    """The kind is `X` for an event and `M` for the name of a line."""
    pid: Count
    """The event is of this rank."""
    tid: Count | None = field(default=None, metadata=OPTIONAL)
    """The event is on line 0 for compute, on line 1 for calls."""
    ts: float | None = field(default=None, metadata=OPTIONAL)
    """The event begins at this time of the machine in microseconds."""
    dur: Amount | None = field(default=None, metadata=OPTIONAL)
    """The event takes this many microseconds."""
    args: Mapping[str, Any] | None = field(default=None, metadata=OPTIONAL)
    """The table has the name of a line under `name`."""


@dataclass(frozen=True, slots=True)
class TraceFile(Open):
    """A trace has what the ranks did in Chrome's trace format: `gopt run --trace FILE` writes it, and `gopt report
    --trace FILE` reads it."""

    events: tuple[TraceEvent, ...] = field(metadata=key("traceEvents"))
    """The list has the names of the lines first, then the events of all ranks."""
