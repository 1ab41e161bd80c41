"""The manifest of an output folder as a record: the files and states of each rank.

``manifest_check`` reads the file and checks conditions beyond the schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.artifact.integrity import FileEntry, sealed
from gopt.artifact.json_writer import json_pieces
from gopt.artifact.manifest_entries import (
    CommonEntry,
    InputEntry,
    InputKind,
    LocalState,
    LossRule,
    MeshEntry,
    PhaseEntry,
    PipelineEntry,
    RankEntry,
    SizesRule,
    SourceState,
    WireType,
    WrittenEntry,
)
from gopt.artifact.pieces import Piece as Piece
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import (
    OPTIONAL,
    Bounds,
    Digest,
    RunIdentity,
    document_items,
    one_of,
    to_document,
)
from gopt.records.host_values import HostValues

FORMAT = "gopt-manifest/1"
MANIFEST_FILE = "manifest.json"
REPORT_FILE = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest describes an output folder: the files that each rank runs, and the states of each rank."""

    format: str = FORMAT
    """The format is the name and version of this format."""
    accumulate: Annotated[int, Bounds(minimum=2)] = field(default=1, metadata=OPTIONAL)
    """One update takes this many micro-steps; the key is absent when a training step has no micro-steps, and one file
    per rank runs it."""
    phases: tuple[PhaseEntry, ...] | None = field(default=None, metadata=OPTIONAL)
    """The list has the phases of a training step in the order in which they run; the key is absent when there is the
    one phase step, which runs once. Each item is one phase, for which every rank has a file."""
    pipeline: PipelineEntry | None = field(default=None, metadata=OPTIONAL)
    """The record describes the stages along the axis pp; the key is absent when no axis cuts the step into stages."""
    loss_reduction: LossRule = field(default="mean", metadata=OPTIONAL)
    """The rule says how the gradients of ranks that see different data become the gradient of the step: sum adds them,
    over micro-steps too, and weighted:VALUE divides the sum of w times gradient by the sum of w, where w is the VALUE
    of the rank; sum:NAME,NAME adds the gradients of these parameters and averages all others; the key is absent when
    the gradient of the step is their mean."""
    reduce_dtype: WireType = field(default="", metadata=OPTIONAL)
    """Gradients travel between ranks in this type; the key is absent when they travel in the type in which they are
    made."""
    statistics: Annotated[str, one_of("root")] = field(default="mean", metadata=OPTIONAL)
    """The rule says what all ranks hold of new running statistics: root stands for the statistics of the first of the
    ranks that see different data (--statistics root); the key is absent when ranks hold their mean."""
    reductions: tuple[StatisticReduction, ...] = field(default=(), metadata=OPTIONAL)
    """The list says of each running statistic how the ranks' values of it are combined; the key is absent when there is
    no statistic, or when statistics or synchronised says it of all."""
    synchronised: SynchronisedValues = field(default=SynchronisedValues(), metadata=OPTIONAL)
    """The record lists what is averaged over all ranks that see different data inside the forward and the backward
    (--statistics sync); the key is absent when nothing is."""
    host: HostValues = field(default=HostValues(), metadata=OPTIONAL)
    """The record lists the values in the memory of the host, beside a device (--offload); the key is absent when all
    are on the device. An engine whose device is the host has nothing to move."""
    mesh: MeshEntry
    """The ranks form a mesh with named axes."""
    split: Mapping[str, SizesRule] | None = field(default=None, metadata=OPTIONAL)
    """The table names the axes that split the computation and says how large parts are: with balanced the first members
    have one unit more where a dimension does not come out even, with ceil all members have the same until the rest is
    smaller, with floor-last the last member has what is left; the key is absent when no axis splits the computation.
    The axis of this name shares dimensions out by this rule."""
    parameter_server: ServerPlanEntry | None = field(default=None, metadata=OPTIONAL)
    """The record says how trainers and servers share the work of a split; the mesh is then the trainers' mesh, and
    servers are the ranks behind them; the key is absent in a folder without servers."""
    source: str
    """The source, without the values of its states, is kept in the folder under this file name."""
    startup: str | None = field(default=None, metadata=OPTIONAL)
    """The file of this name has no inputs and computes first values of states of the source, an output of the same name
    for each; the key is absent when the source has no graph that computes them."""
    loss: str
    """The loss is the output of this name, in the source and in the files of the ranks. It is not reduced over ranks
    that see different data: each returns the loss of its own samples. The loss of a step, as gopt run shows it, is the
    mean over all ranks and micro-steps, weighed by VALUE where loss_reduction is weighted:VALUE."""
    samples_axis: Annotated[int, Bounds(minimum=1, maximum=1)] = field(default=0, metadata=OPTIONAL)
    """The inputs of the batch have the samples along this dimension, and time along dimension 0; the key is absent when
    dimension 0 counts the samples."""
    more_losses: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The outputs in this list are losses beside the first; the key is absent when there is no other. Each item is the
    name of an output."""
    states: tuple[SourceState, ...]
    """The list has every state of the source. Each item is one state of the source."""
    common: CommonEntry
    """The record describes what all ranks have alike."""
    ranks: tuple[RankEntry, ...]
    """The list has the ranks that were written, in ascending order."""
    written: WrittenEntry | None = field(default=None, metadata=OPTIONAL)
    """The record has the SHA-256 of a few files; an older version wrote it in the place of files, and nothing reads
    it."""
    run: RunIdentity | None = field(default=None, metadata=OPTIONAL)
    """The identity of the run whose steps lie in this folder of checkpoints, drawn at random when it first started; the
    key is absent in an output folder, and in a folder of an older version."""
    files: Mapping[str, FileEntry] | None = field(default=None, metadata=OPTIONAL)
    """The table lists every other file of the folder that gopt reads, in a folder of checkpoints those beside the
    steps; a command compares each file with its entry before it reads it; the key is absent in folders of older
    versions. The value describes the file of this name."""
    seal: Digest | None = field(default=None, metadata=OPTIONAL)
    """The digest is the SHA-256 of the bytes of this document that stand before the comma in front of this key, in
    hexadecimal digits; the key is the last one, and is absent in documents of older versions."""

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss, *self.more_losses)

    @property
    def schedule(self) -> dict[str, int]:
        """Phases in order of running -> number of runs in a step."""
        return {phase.name: phase.times for phase in self.phases or (PhaseEntry("step", 1),)}

    @property
    def total_ranks(self) -> int:
        """The ranks of the mesh, and the servers behind."""
        return self.mesh.ranks + (0 if self.parameter_server is None else self.parameter_server.servers)

    def with_trainers(self, count: int) -> Manifest:
        """Return the manifest of a split for another number of trainers; all trainers are equal."""
        trainers = [rank for rank in self.ranks if rank.role == "trainer"]
        if len(trainers) == count:
            return self
        ranks = [trainers[0]] * count + [rank for rank in self.ranks if rank.role != "trainer"]
        mesh = MeshEntry((("dp", count),), count)
        ranks = [replace(rank, rank=number) for number, rank in enumerate(ranks)]
        plan = self.parameter_server and replace(self.parameter_server, roles=None)  # they are for the old number
        return replace(self, mesh=mesh, parameter_server=plan, ranks=tuple(ranks))

    def states_of(self, rank: RankEntry) -> tuple[LocalState, ...]:
        """All states that a rank holds."""
        return (*self.common.state, *rank.state)

    def fed(self, rank: RankEntry) -> set[str]:
        """The inputs of a rank's files with states, sums, saved values, batch and settings; others are constants."""
        common = [state.input for state in self.common.state] + [entry.name for entry in self.common.inputs]
        return {*rank.inputs, *common}

    def next_inputs(self, rank: RankEntry) -> dict[str, str]:
        """A rank's output replacing a state or an accumulator -> the replaced input."""
        states = {state.output: state.input for state in self.states_of(rank)}
        return states | {accumulator.output: accumulator.input for accumulator in rank.accumulators}

    def inputs_of(self, kind: InputKind) -> list[InputEntry]:
        """The inputs of a kind, in order."""
        return [entry for entry in self.common.inputs if entry.kind is kind]

    @property
    def bare(self) -> Manifest:
        """The manifest without entries on files and the job."""
        return replace(self, written=None, run=None, files=None, seal=None)

    @property
    def draws(self) -> dict[str, Draw]:
        """The inputs of random numbers, and the distribution of each."""
        return {entry.name: entry.draw for entry in self.common.inputs if entry.draw is not None}

    @property
    def defaults(self) -> dict[str, DefaultValue]:
        """The hyper-parameters the step has values for."""
        return {entry.name: entry.default for entry in self.common.inputs if entry.default is not None}

    def digest(self) -> str:
        """Identifies the ranks of a checkpoint, whatever their start values."""
        same = replace(self.bare, host=HostValues())  # steps are the same wherever values lie
        return hashlib.sha256(json.dumps(same.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The document as written."""
        return to_document(self)

    @property
    def read_digests(self) -> dict[str, str]:
        """The SHA-256 of the files that a proof reads, start values too, as listed, by name: all but the report."""
        return {name: entry.sha256 for name, entry in sorted((self.files or {}).items()) if name != REPORT_FILE}

    def text(self) -> str:
        """The text of the file, sealed if files are listed."""
        text = "".join(json_pieces(document_items(replace(self, files=None, seal=None))))
        return text if self.files is None else sealed(text, self.files)
