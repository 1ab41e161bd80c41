"""The report of an output folder as a record: what was removed, added and moved, and what it costs.

``gopt/schemas/report.schema.json`` describes every key. ``report_builder`` makes the record, ``manifest_check`` reads
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gopt.analysis.coupling.marks import Coupling
from gopt.artifact.integrity import Inventory
from gopt.artifact.json_writer import json_pieces
from gopt.artifact.manifest import MeshEntry
from gopt.artifact.report_groups import AddedVarGroup, OpGroup, RemovedVarGroup
from gopt.documents.records import OPTIONAL, document_items, key, to_document
from gopt.lower.invariants import Check
from gopt.pass_records import PassRecord
from gopt.sharding.traffic import Overlap

FORMAT = "gopt-report/2"
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """The source: its file, and how many nodes, inputs, outputs and states of each kind it has."""

    file: str
    sha256: str
    nbytes: int = field(metadata=key("bytes"))
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes that a rank holds. ``gradients``: reduced ones, or its own where no call reduces any."""

    parameters: int
    optimizer_states: int
    gradients: int

    @property
    def by_kind(self) -> dict[str, int]:
        return {
            "parameters": self.parameters, "optimizer_states": self.optimizer_states, "gradients": self.gradients,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallEntry:
    """All calls of one collective over one group that a rank makes in one update."""

    op: str
    group: str
    calls: int
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class RankUsage:
    """Bytes that a rank holds, and that it sends in one update with all its micro-steps."""

    rank: int
    nbytes: RankBytes = field(metadata=key("bytes"))
    communication: tuple[CallEntry, ...]

    @property
    def bytes_sent(self) -> int:
        return sum(each.bytes_sent for each in self.communication)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a rank sends in one update, as a mean over the ranks, beside the least that it could send."""

    sent: int
    by_kind: Mapping[str, int]
    bound: int
    ratio: float


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls of a step, beside the fewest that could carry the same tensors in buckets of ``cap`` bytes."""

    count: int
    packing_bound: int
    cap: int | None


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Casts of parameters to a low precision, the largest over the ranks, and the tensors that they serve."""

    per_update: int
    owned_tensors: int
    in_forward: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The step against its bounds."""

    traffic: Traffic
    calls: CallCounts
    casts: CastCounts
    overlap: Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEntry:
    """The choice of ``--auto`` out of ``weighed`` choices, and its reason; bytes are the maximum over the ranks."""

    weighed: int
    memory: int | None
    link: str | None
    stage: int
    partition: str
    bucket_mb: float | None
    nbytes: Mapping[str, int] = field(metadata=key("bytes"))
    traffic: Mapping[str, float]
    calls: CallCounts
    balance: float
    hidden_share: float
    seconds: Mapping[str, float] | None = field(default=None, metadata=OPTIONAL)
    fits: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Size of one step, in bytes except ``nodes`` and ``calls``. Traffic and calls are those of one update."""

    nodes: int
    parameters: int
    optimizer_states: int
    gradients: int
    peak_live: int
    initializers: int
    calls: int
    traffic: int

    @property
    def held(self) -> int:
        """Bytes of states and live values together."""
        return self.parameters + self.optimizer_states + self.peak_live


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """The source against the rank that holds most."""

    rank: int
    source: StepSize
    largest: StepSize


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Removed, added and moved items. The report grows with the graph, not with graph times ranks."""

    format: str = FORMAT
    source: SourceEntry
    mesh: MeshEntry
    pipeline: tuple[PassRecord, ...]
    notes: tuple[str, ...]
    couplings: tuple[Coupling, ...]
    before_after: BeforeAfter | None = field(default=None, metadata=OPTIONAL)
    removed_ops: tuple[OpGroup, ...]
    removed_vars: tuple[RemovedVarGroup, ...]
    added_ops: tuple[OpGroup, ...]
    added_vars: tuple[AddedVarGroup, ...]
    ranks: tuple[RankUsage, ...]
    balance: Mapping[str, float]
    figures: Figures
    checks: tuple[Check, ...]
    choice: ChoiceEntry | None = field(default=None, metadata=OPTIONAL)

    def ran(self, name: str) -> PassRecord | None:
        """The pass of this name, or None where it did not run."""
        return next((each for each in self.pipeline if each.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The document as it is written."""
        return to_document(self)

    def text(self) -> str:
        """The text of the file."""
        return "".join(self.pieces())

    def write(self, files: Inventory) -> None:
        """Write it as a file of a folder; raises OSError."""
        with files.create(REPORT_FILE) as file:
            file.writelines(piece.encode() for piece in self.pieces())

    def pieces(self) -> Iterator[str]:
        """The text piece by piece: whole, it is as large as all rank files of a long graph."""
        return json_pieces(document_items(self))
