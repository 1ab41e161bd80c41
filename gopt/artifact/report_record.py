"""The report of an output folder as a record: removed, added and moved items, and costs.

``report_builder`` makes the record, ``manifest_check`` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from gopt.analysis.coupling.marks import Coupling
from gopt.artifact.integrity import Inventory
from gopt.artifact.json_writer import json_pieces
from gopt.artifact.manifest import REPORT_FILE as REPORT_FILE
from gopt.artifact.manifest_entries import MeshEntry
from gopt.artifact.report_groups import AddedVarGroup, OpGroup, RemovedVarGroup
from gopt.documents.records import BY_PASS, OPTIONAL, Amount, Count, Digest, Positive, document_items, key, to_document
from gopt.records.checks import Check
from gopt.records.pass_facts import PassRecord, TrafficKind
from gopt.spmd.traffic import Overlap

FORMAT = "gopt-report/2"


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """The source: file, and numbers of nodes, inputs, outputs and states of each kind."""

    file: str
    """The source was read from a file of this name, without its path."""
    sha256: Digest
    """The digest is the SHA-256 of that file, in hexadecimal digits."""
    nbytes: Count = field(metadata=key("bytes"))
    """That file has this many bytes, without values that it keeps in other files."""
    counts: Mapping[str, Count]
    """The table counts what the source has: nodes, where an opaque optimizer counts as it is written, inputs, outputs,
    and states by the words for their kinds; a kind without states is absent."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes a rank holds. ``gradients``: reduced ones, or its own where no call reduces any."""

    parameters: Count
    """The rank holds this many bytes of parameters, low-precision copies included."""
    optimizer_states: Count
    """The rank holds this many bytes of optimizer states, the source's own accumulators included."""
    gradients: Count
    """Bytes of gradients that the rank holds at once: reduced ones, or its own where no call reduces any; accumulators
    of --accumulate included."""
    host: Count = field(default=0, metadata=OPTIONAL)
    """Of the bytes of parameters and optimizer states, this many are in the memory of the host; the key is absent when
    all are on the device."""

    @property
    def by_kind(self) -> dict[str, int]:
        return {
            "parameters": self.parameters, "optimizer_states": self.optimizer_states, "gradients": self.gradients,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallEntry:
    """All of a rank's calls of a collective over one group in one update."""

    op: str
    """The calls are of this collective."""
    group: str
    """The calls run over this group: the names of its axes with + between."""
    calls: Count
    """The rank makes this many of them in one update, all its micro-steps included."""
    bytes_sent: Count
    """The rank sends this many bytes by them in one update, counted for a bandwidth-optimal ring."""


@dataclass(frozen=True, slots=True)
class RankUsage:
    """Bytes in a rank's memory, and bytes that the rank sends in one update with all micro-steps."""

    rank: Count
    """The rank has this number, counted from 0."""
    nbytes: RankBytes = field(metadata=key("bytes"))
    """The table gives the bytes that the rank holds, by kind."""
    communication: tuple[CallEntry, ...]
    """The list has what the rank sends in one update, by collective and group. Each item is all calls of one collective
    over one group."""

    @property
    def bytes_sent(self) -> int:
        return sum(entry.bytes_sent for entry in self.communication)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes a rank sends in one update, as a mean over the ranks, beside the least it could send."""

    sent: Count
    """A rank sends this many bytes."""
    by_kind: Mapping[TrafficKind, Count]
    """The table gives the bytes sent by what they are; a kind that is not sent is absent."""
    bound: Count
    """A rank cannot send fewer bytes than this minimum traffic of gradients and parameters, however the step is
    sharded."""
    ratio: Amount
    """The ratio is sent over bound, and 1 when the bound is 0."""


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls of a step, beside the fewest that could carry the same tensors in buckets of ``cap`` bytes."""

    count: Count
    """The step has this many calls, each counted once however often it runs in one update."""
    packing_bound: Count
    """No packing of the same tensors under the cap has fewer calls than this."""
    cap: Count | None
    """A bucket has at most this many bytes, unless it is one tensor; null means that no pass made buckets."""


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Casts of parameters to a low precision, the largest over the ranks, and the tensors they serve."""

    per_update: Count
    """A rank makes this many casts behind an update or before a gather."""
    owned_tensors: Count
    """A rank holds elements of this many of the parameters that are read in a low precision."""
    in_forward: Count
    """This many casts stay where the source has them."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The step against its bounds."""

    traffic: Traffic
    """The record says what a rank sends, as a mean over the ranks, for one update."""
    calls: CallCounts
    """The record counts calls."""
    casts: CastCounts
    """The record counts casts of parameters to float16 or bfloat16, the largest over the ranks."""
    overlap: Overlap
    """The record says what calls can hide behind, in the step as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEntry:
    """The choice of ``--auto`` out of ``weighed`` choices, and the reason; bytes are the maximum over the ranks."""

    weighed: Count
    """gopt weighed this many choices."""
    memory: Count | None
    """A rank may hold this many bytes (--memory); null means that no limit was given."""
    link: str | None
    """The links between ranks are these, as --link gave them; null means that none were given."""
    device: str | None = field(default=None, metadata=OPTIONAL)
    """Steps were timed on the device of this name; the key is absent when no device was given."""
    stage: Count
    """The choice has this stage."""
    partition: str
    """The choice has this partition."""
    bucket_mb: Amount | None
    """The choice has buckets of at most this many MiB; null means the default."""
    accumulate: Positive = field(default=1, metadata=OPTIONAL)
    """The choice has this many micro-batches; the key is absent for 1."""
    schedule: str | None = field(default=None, metadata=OPTIONAL)
    """The choice has this order of micro-batches on pipeline stages; the key is absent without stages."""
    recompute: str | None = field(default=None, metadata=OPTIONAL)
    """The choice computes values of the forward again by this policy; the key is absent where it does not."""
    offload: str | None = field(default=None, metadata=OPTIONAL)
    """The choice has these values in the memory of the host; the key is absent where all are on the device."""
    sequence: bool = field(default=False, metadata=OPTIONAL)
    """The choice divides tokens along tp between products (sequence parallelism); the key is absent where not."""
    nbytes: Mapping[str, Count] = field(metadata=key("bytes"))
    """The table gives the bytes that a rank holds, estimated from the graph that all ranks have in common: parameters
    and optimizer_states that the fullest rank holds between steps, low-precision copies included; gradients, gathered
    parameters (gathered) and all other values (activations) that are alive at once; live, the most of the three
    together; accumulated, sums over micro-batches that live leaves out; and total, the sum of parameters,
    optimizer_states, live and accumulated."""
    traffic: Mapping[str, Amount]
    """The table says what a rank sends, as a mean over the ranks, for one update: the bytes sent, the bound of bytes
    below which a rank cannot go, however the step is sharded, and ratio, sent over bound, 1 when the bound is 0."""
    calls: CallCounts
    """The table counts calls."""
    balance: Amount
    """The number is the largest over the mean over the ranks, of the most uneven kind of bytes."""
    hidden_share: Amount
    """This share of all bytes sent, 0 to 1, has independent heavy computation to hide behind."""
    seconds: Mapping[str, Amount] | None = field(default=None, metadata=OPTIONAL)
    """The table gives seconds that the calls of one step take on the links: total, one after the other, exposed, hidden
    by no computation, and latency, of the calls; the key is absent when no links were given."""
    step: Mapping[str, Amount] | None = field(default=None, metadata=OPTIONAL)
    """The table gives seconds of one step on the device, and the parts that add up to them: compute, recompute,
    exposed calls, bubble of pipeline stages, and fixed, beside the operators; the key is absent when no device was
    given."""
    fits: bool
    """The value says whether the total is within memory; it is true when no limit was given."""
    why: str
    """The sentence says why the choice is the first."""


@dataclass(frozen=True, slots=True)
class ProofEntry:
    """The proof of the ranks, as ``gopt prove`` gives it: equal to the source's step for all values."""

    verdict: str
    """The word is proven, or unproven where the laws do not decide some value; ranks with a different value are not
    written."""
    proven: Count
    """This many new states, losses and metrics are proven."""
    open: tuple[str, ...]
    """The list has the names of all other new states, losses and metrics."""
    reason: str
    """The text says why something is unproven; it is empty for a complete proof."""
    files: Digest
    """The digest is the SHA-256 of the names and digests of the files that were read, and of the manifest."""
    unwritten: Count = field(default=0, metadata=OPTIONAL)
    """So many more ranks of the mesh are in the proof, by files of kinds of ranks, and were not written; the key is
    absent where all ranks were written."""

    def line(self) -> str:
        """The proof in a line."""
        count = self.proven + len(self.open)
        what = f"{self.proven} of {count} new states, losses and metrics equal the source's for all values"
        what += f", on all ranks: {self.unwritten} were not written" if self.unwritten else ""
        return f"proven: {what}" if not self.reason else f"NOT proven: {self.reason}{f'; {what}' if count else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """Size of one step, in bytes except ``nodes`` and ``calls``. Traffic and calls are counted for one update."""

    nodes: Count
    """The step has this many nodes, in all its files."""
    parameters: Count
    """Parameters take this many bytes between steps, low-precision copies included."""
    optimizer_states: Count
    """Optimizer states take this many bytes between steps, accumulators of the source included."""
    gradients: Count
    """Gradients take this many bytes: in the source the gradients of all parameters, on a rank the reduced gradients
    that it holds at once."""
    peak_live: Count
    """Beside states, inputs and constants, at most this many bytes are alive at once, in the order of the nodes."""
    initializers: Count
    """Initial values of states and constants take this many bytes on disk."""
    calls: Count
    """The step makes this many collective calls in one update, all its micro-steps included."""
    traffic: Count
    """The step sends this many bytes in one update."""
    host: Count = field(default=0, metadata=OPTIONAL)
    """Of the bytes of parameters and optimizer states, this many are in the memory of the host; the key is absent when
    all are on the device."""

    @property
    def held(self) -> int:
        """Bytes of states and live values together on the device."""
        return self.parameters + self.optimizer_states + self.peak_live - self.host


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """The source against the rank holding most."""

    rank: Count
    """The rank with the most bytes of parameters, optimizer states and live values has this number."""
    source: StepSize
    """The source's step has these sizes."""
    largest: StepSize
    """The step of that rank has these sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Removed, added and moved items. The report grows with the graph, not with graph times ranks."""

    format: str = FORMAT
    """The format is the name and version of this format."""
    source: SourceEntry
    """The record describes the source."""
    mesh: MeshEntry
    """The ranks form a mesh with named axes."""
    pipeline: tuple[Annotated[PassRecord, BY_PASS], ...]
    """The list has the passes that ran, in order."""
    notes: tuple[str, ...]
    """The list has what the user should know of the result, in words."""
    couplings: tuple[Coupling, ...]
    """The list has the places where the sharded step differs from one large batch's, or may differ; it is empty when
    gopt finds none."""
    before_after: BeforeAfter | None = field(default=None, metadata=OPTIONAL)
    """The record holds the source against the rank that holds most, and the key is absent for a split."""
    removed_ops: tuple[OpGroup, ...]
    """The list has the nodes of the source that some rank does not run, each of them by name, in groups. Each item is a
    group of nodes with one reason and the ranks that do not run them."""
    removed_vars: tuple[RemovedVarGroup, ...]
    """The list has the values of the source that some rank does not have whole, each of them by name, in groups. Each
    item is a group of values with one reason and the ranks that do not have them."""
    added_ops: tuple[OpGroup, ...]
    """The list has the nodes that passes made, each of them by name, in groups. Each item is a group of nodes with one
    reason and the ranks that run them."""
    added_vars: tuple[AddedVarGroup, ...]
    """The list has the values that passes made, each of them by name, in groups. Each item is a group of values with
    one reason."""
    ranks: tuple[RankUsage, ...]
    """The list has what each rank that was written holds and sends."""
    balance: Mapping[str, float]
    """The table gives, by kind of bytes of ranks (parameters, optimizer_states, gradients), the largest over the mean
    over the ranks; 1 means that all hold the same, or nothing."""
    figures: Figures
    """The record holds the step against bounds."""
    checks: tuple[Check, ...]
    """The list has the invariants that held of the result before it was written."""
    proof: ProofEntry | None = field(default=None, metadata=OPTIONAL)
    """The record says what gopt proved of the ranks before it wrote them; the key is absent with --no-prove."""
    choice: ChoiceEntry | None = field(default=None, metadata=OPTIONAL)
    """The record says what --auto chose, and why; the key is absent without --auto."""

    def ran(self, name: str) -> PassRecord | None:
        """The pass of this name, or None."""
        return next((record for record in self.pipeline if record.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """The document as written."""
        return to_document(self)

    def text(self) -> str:
        """The text of the file."""
        return "".join(self.pieces())

    def write(self, files: Inventory) -> None:
        """Write the report as a file of a folder; raises OSError."""
        with files.create(REPORT_FILE) as file:
            file.writelines(piece.encode() for piece in self.pieces())

    def pieces(self) -> Iterator[str]:
        """The text piece by piece: the whole is as large as all rank files of a long graph."""
        return json_pieces(document_items(self))
