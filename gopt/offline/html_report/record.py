"""The contents of the page, as records: the JSON block inside the page, and what ``gopt report --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gopt.artifact.report_groups import AddedVarGroup, OpGroup, RemovedVarGroup
from gopt.artifact.report_record import CallEntry, RankBytes, Traffic
from gopt.documents.records import OPTIONAL, key, to_document
from gopt.records.checks import Check

FORMAT = "gopt-report-page/1"


@dataclass(frozen=True, slots=True)
class Heading:
    """The request. ``mesh``: as ``dp=2,shard=4``; ``stage`` and ``partition`` are None for a split."""

    file: str
    sha256: str
    nbytes: int = field(metadata=key("bytes"))
    nodes: int
    mesh: str
    ranks: int
    servers: int
    stage: int | None
    partition: str | None
    accumulate: int
    loss: str


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One row of the table before and after. ``unit``: ``bytes`` or ``count``; None where it has no meaning."""

    what: str
    unit: str
    values: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class SizeTable:
    """The source against ranks; ``columns`` name them."""

    columns: tuple[str, ...]
    rows: tuple[SizeRow, ...]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks with equal memory and traffic. ``communication``: the calls of one rank in one update."""

    role: str
    ranks: str
    count: int
    nbytes: RankBytes = field(metadata=key("bytes"))
    sent: int
    communication: tuple[CallEntry, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of the chart of memory: ranks that are alike, or the fullest of neighbouring ranks that are not."""

    label: str
    nbytes: RankBytes = field(metadata=key("bytes"))


@dataclass(frozen=True, slots=True)
class BalanceRow:
    """Bytes of one kind over the ranks of one role."""

    role: str
    kind: str
    smallest: int
    mean: float
    largest: int
    rank: int
    """The first that holds the most."""

    ratio: float
    """Largest over mean; 1 where nothing is held."""


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """The bytes sent by one collective over one group in one update, as the mean over the group's ranks."""

    group: str
    op: str
    ranks: int
    calls: float
    sent: float
    largest: int


@dataclass(frozen=True, slots=True)
class Span:
    """A bar of the timeline. ``kind``: a phase of compute, or the operator of a call. ``nbytes``: what the call moves.
    ``hidden``: whether heavy work stands between the call and the first node that computes with its result."""

    lane: int
    kind: str
    name: str
    start: float
    end: float
    nbytes: int | None = field(default=None, metadata={**key("bytes"), **OPTIONAL})
    hidden: bool | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Timeline:
    """The step. ``unit``: ``operators``, the place in the order of the nodes, or ``ms`` of a trace. ``focus``: the part
    to show first. ``dropped``: spans that the page leaves out."""

    source: str
    unit: str
    note: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    focus: tuple[float, ...]
    dropped: int


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member of axis ``pp``. ``waits``: the part of the time without an action; ``live``: the most forwards whose
    backward has not ended."""

    member: int
    stages: tuple[int, ...]
    actions: int
    waits: float
    live: int


@dataclass(frozen=True, slots=True)
class SchedulePicture:
    """The schedule of pipeline stages. ``bubble``: as simulated, with a backward of two forwards; ``formula``: the
    fraction of a known schedule."""

    name: str
    micro_batches: int
    bubble: float
    formula: str | None
    svg: str
    members: tuple[MemberRow, ...]


@dataclass(frozen=True, slots=True)
class RoleCounts:
    """Operators and values of one role that a pass removed and added."""

    pass_name: str = field(metadata=key("pass"))
    role: str
    removed_ops: int
    added_ops: int
    removed_vars: int
    added_vars: int


@dataclass(frozen=True, slots=True)
class PassEntry:
    """A pass that ran: its options as text, and its note."""

    name: str
    options: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True)
class WorstError:
    """Of one variant of the verification, the value that is furthest off; ``error`` is relative."""

    variant: str
    name: str
    kind: str
    rank: int | None
    step: int | None
    error: float | None


@dataclass(frozen=True, slots=True)
class PageDoubt:
    """A value that could not be confirmed, or was shown to be no gradient, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The findings of ``gopt verify``. ``doubts`` has the first of ``unconfirmed``."""

    outcome: str
    tolerance: float
    steps: int
    ranks: int
    compared: int
    worst: tuple[WorstError, ...]
    gradients: int
    confirmed: int
    unconfirmed: int
    doubts: tuple[PageDoubt, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPage:
    """All that the page shows; it grows with the graph, not with graph times ranks."""

    format: str = FORMAT
    folder: str
    heading: Heading
    before_after: SizeTable
    ranks: tuple[RankGroup, ...]
    bars: tuple[Bar, ...]
    balance: tuple[BalanceRow, ...]
    groups: tuple[GroupTraffic, ...]
    traffic: Traffic
    figures: Mapping[str, float]
    """Calls of a step, the fewest that could carry the same, and the overlapped share of the bytes sent."""
    timeline: Timeline
    schedule: SchedulePicture | None
    roles: tuple[RoleCounts, ...]
    passes: tuple[PassEntry, ...]
    notes: tuple[str, ...]
    checks: tuple[Check, ...]
    proof: Proof | None
    removed_ops: tuple[OpGroup, ...]
    added_ops: tuple[OpGroup, ...]
    removed_vars: tuple[RemovedVarGroup, ...]
    added_vars: tuple[AddedVarGroup, ...]

    def to_json(self) -> dict[str, Any]:
        """The document as it is written."""
        return to_document(self)
