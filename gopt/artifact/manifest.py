"""The manifest of an output folder as a record: the files and states of each rank.

``manifest_check`` reads the file and checks conditions beyond the schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any

import numpy as np

from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import StateKind
from gopt.artifact.integrity import FileEntry, sealed
from gopt.artifact.json_writer import json_pieces
from gopt.artifact.pieces import Piece as Piece
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import (
    OPTIONAL,
    Bounds,
    Count,
    Digest,
    Positive,
    RunIdentity,
    document_items,
    one_of,
    to_document,
)
from gopt.ir.types import TensorType
from gopt.records.boxes import Box, take
from gopt.records.mesh import AxisKind, Mesh
from gopt.records.pass_facts import SIZES

FORMAT = "gopt-manifest/1"
MANIFEST_FILE = "manifest.json"
REPORT_FILE = "report.json"
LossRule = Annotated[str, Bounds(pattern="^(sum|sum:.+|weighted:.+)$")]
WireType = Annotated[str, one_of("float32", "float16", "bfloat16")]
SizesRule = Annotated[str, SIZES]
Shape = tuple[Count | str | None, ...]


class InputKind(StrEnum):
    """Kind of an input that is not a state."""

    BATCH = "batch"
    HYPER = "hyper"


@dataclass(frozen=True, slots=True)
class MeshEntry:
    """The mesh in documents."""

    axes: tuple[tuple[str, Positive], ...]
    """The axes stand in mesh order; the last one varies fastest with the number of the rank. Each item is one axis: its
    name and its size. The first element is the name of the axis. The second element is the number of ranks along the
    axis."""
    ranks: Positive
    """The number of ranks is the product of the sizes of the axes."""
    kinds: Mapping[str, Annotated[AxisKind, one_of("data", "replica")]] | None = field(default=None, metadata=OPTIONAL)
    """The kinds say what the ranks along an axis see of the data, for the axes of which the user said it; the key is
    absent when the user said it of none. The value is data where the ranks along the axis see samples of their own, and
    replica where they see the same samples."""

    @classmethod
    def of(cls, mesh: Mesh) -> MeshEntry:
        return cls(mesh.axes, mesh.ranks, dict(mesh.kinds) or None)

    def mesh(self) -> Mesh:
        """Return the mesh of these axes; raises OptionError if they are invalid."""
        return Mesh.from_record(to_document(self))


@dataclass(frozen=True, slots=True)
class PhaseEntry:
    """A phase of a step, and its number of runs in a step."""

    name: str
    """The phase has this name, which is a key of files of every rank."""
    times: Positive
    """The phase runs this many times in one training step."""


@dataclass(frozen=True, slots=True)
class SourceState:
    """A state of the source: its input, the output replacing it, and the parameter it belongs to."""

    tensor: str
    """The state is the input of this name of the source."""
    updated: str
    """The output of this name of the source replaces the state."""
    kind: StateKind
    """The kind is that of the state, in the words of the glossary."""
    of: str | None
    """The state belongs to the parameter of this name; null means that it is a parameter itself, or belongs to none."""
    dtype: str
    """The elements of the state have this type."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown. An integer is
    the length of the dimension, a string is the name of a length that the source leaves open, and null is an unknown
    length."""

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class InputEntry:
    """An input that is not a state."""

    name: str
    """The input has this name."""
    dtype: str
    """The elements of the input have this type."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown. An integer is
    the length of the dimension, a string is the name of a length that the source leaves open, and null is an unknown
    length."""
    kind: InputKind
    """The kind is batch for an input that belongs to the batch, and hyper for a hyper-parameter."""
    draw: Draw | None = field(default=None, metadata=OPTIONAL)
    """The input is of random numbers, which a run draws from this where the data has none; the key is absent for other
    inputs."""

    default: DefaultValue | None = field(default=None, metadata=OPTIONAL)
    """The value of the hyper-parameter where a run sets none; the key is absent where one must be set."""

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class OutputEntry:
    """An output replacing no state."""

    name: str
    """The output has this name."""
    dtype: str
    """The elements of the output have this type."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown. An integer is
    the length of the dimension, a string is the name of a length that the source leaves open, and null is an unknown
    length."""


@dataclass(frozen=True, slots=True)
class LocalState:
    """A state as a rank holds it: its pieces, flattened, one after the other."""

    input: str
    """The files of the rank read the state as the input of this name."""
    output: str
    """The files of the rank return the new state as the output of this name."""
    pieces: tuple[Piece, ...]
    """The state is these pieces, flattened, one after the other."""
    local: bool = field(default=False, metadata=OPTIONAL)
    """The value is true where ranks hold different values of the state, a running statistic that is not averaged; the
    key is absent otherwise."""
    copy: bool = field(default=False, metadata=OPTIONAL)
    """The value is true where the state is a low-precision copy, always the cast of another state of the ranks; the key
    is absent otherwise."""

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class LocalAccumulator:
    """A sum of gradients a rank carries from file to file: zero before the first micro-step."""

    input: str
    """The files of the rank read the accumulator as the input of this name."""
    output: str
    """The files of the rank return the new accumulator as the output of this name."""
    dtype: str
    """The elements of the accumulator have this type."""
    shape: tuple[Count, ...]
    """The shape is the list of the lengths of the dimensions, in elements."""

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value of a micro-batch carried from an earlier file of a rank to a later file."""

    name: str
    """An earlier file of the rank returns the value as the output of this name, and a later file reads the input of
    this name."""
    dtype: str
    """The elements of the value have this type."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown. An integer is
    the length of the dimension, a string is the name of a length that the source leaves open, and null is an unknown
    length."""

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class FedInput:
    """An input of the batch of which a rank is fed a part: the ``box`` of what ranks with these samples share."""

    input: str
    """The files of the rank read the part as the input of this name."""
    box: Box
    """The box is the part of the whole batch that the rank is fed."""


@dataclass(frozen=True, slots=True)
class CommonEntry:
    """Entries that are equal on all ranks."""

    inputs: tuple[InputEntry, ...]
    """The list has the inputs of a rank that are no states: the batch and the hyper-parameters."""
    outputs: tuple[OutputEntry, ...]
    """The list has the outputs of a rank that replace no state: losses first, then metrics."""
    state: tuple[LocalState, ...]
    """The list has the states that every rank holds whole."""


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank: its files by phase, and what it holds beside what all ranks have."""

    rank: Count
    """The rank has this number, counted from 0."""
    role: str
    """The role says what the rank does: trainer or server."""
    files: Mapping[str, str]
    """The table gives the name of a file in the folder for each phase of the rank: step runs a whole training step;
    with micro-steps, micro runs one of them, and update the update."""
    state: tuple[LocalState, ...]
    """The list has the states that the rank holds beside those of common: shards, and whole states of which it is the
    owner."""
    accumulators: tuple[LocalAccumulator, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the accumulators of the rank, sums of gradients that it carries from file to file and that are zero
    before the first micro-step; the key is absent when the rank has none."""
    saved: tuple[SavedValue, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the values that the forward of a micro-batch leaves for its backward, where the ranks are stages of
    a pipeline; the key is absent when the rank has none."""
    fed: tuple[FedInput, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the inputs of the batch of which the rank is fed a part, where an axis of the mesh shares samples
    out by tokens, rows or columns; the key is absent when the rank is fed whole batches. Each item is one input of the
    batch."""
    startup: str | None = field(default=None, metadata=OPTIONAL)
    """The file of this name has no inputs and computes first values of states of the rank, an output for each with the
    name of the state's input; a run that starts anew takes them in place of stored values; the key is absent when the
    rank has no such file."""

    def feeds(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the rank's inputs, cut from a whole batch."""
        parts = {entry.input: entry.box for entry in self.fed}
        return {name: take(value, parts.get(name)) for name, value in batch.items()}

    @property
    def inputs(self) -> list[str]:
        """The inputs of the rank's files with its own states and accumulators."""
        names = [state.input for state in self.state] + [accumulator.input for accumulator in self.accumulators]
        return names + [value.name for value in self.saved]


@dataclass(frozen=True, slots=True)
class WrittenEntry:
    """The digests of a few files: an older gopt wrote them in the place of ``files``."""

    report: Digest
    """The digest of report.json."""
    states_file: Digest = field(default="", metadata=OPTIONAL)
    """The digest of states.bin; the key is absent when the folder has no values."""
    starts: Mapping[str, Digest] = field(default_factory=dict)
    """The table has the digest of the start value of each state whose value is in states.bin: of the bytes of the whole
    tensor, row by row, little-endian. The value is the digest for the state with this name in the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest describes an output folder: which files each rank runs, and which states it holds."""

    format: str = FORMAT
    """The format is the name and version of this format."""
    accumulate: Annotated[int, Bounds(minimum=2)] = field(default=1, metadata=OPTIONAL)
    """One update takes this many micro-steps; the key is absent when a training step has no micro-steps, and one file
    per rank runs it."""
    phases: tuple[PhaseEntry, ...] | None = field(default=None, metadata=OPTIONAL)
    """The list has the phases of a training step in the order in which they run; the key is absent when there is the
    one phase step, which runs once. Each item is one phase, for which every rank has a file."""
    loss_reduction: LossRule = field(default="mean", metadata=OPTIONAL)
    """The rule says how the gradients of ranks that see different data become the gradient of the step: sum adds them,
    over micro-steps too, and weighted:VALUE divides the sum of w times gradient by the sum of w, where w is the VALUE
    of the rank; sum:NAME,NAME adds the gradients of these parameters and averages all others; the key is absent when
    the gradient of the step is their mean."""
    reduce_dtype: WireType = field(default="", metadata=OPTIONAL)
    """Gradients travel between ranks in this type; the key is absent when they travel in the type in which they are
    made."""
    statistics: Annotated[str, one_of("root")] = field(default="mean", metadata=OPTIONAL)
    """The rule says what all ranks hold of new running statistics: root is those of the first of the ranks that see
    different data (--statistics root); the key is absent when it is their mean."""
    reductions: tuple[StatisticReduction, ...] = field(default=(), metadata=OPTIONAL)
    """The list says of each running statistic how the ranks' values of it are combined; the key is absent when there is
    no statistic, or when statistics or synchronised says it of all."""
    synchronised: SynchronisedValues = field(default=SynchronisedValues(), metadata=OPTIONAL)
    """The record lists what is averaged over all ranks that see different data inside the forward and the backward
    (--statistics sync); the key is absent when nothing is."""
    mesh: MeshEntry
    """The ranks form a mesh with named axes."""
    split: Mapping[str, SizesRule] | None = field(default=None, metadata=OPTIONAL)
    """The table names the axes that split the computation and says how large parts are: with balanced the first members
    have one unit more where a dimension does not come out even, with ceil all members have the same until the rest is
    smaller, with floor-last the last member has what is left; the key is absent when no axis splits the computation.
    The axis of this name shares dimensions out by this rule."""
    parameter_server: ServerPlanEntry | None = field(default=None, metadata=OPTIONAL)
    """The record says how trainers and servers share the work of a split; the mesh is then that of the trainers, and
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
        return hashlib.sha256(json.dumps(self.bare.to_json(), sort_keys=True).encode()).hexdigest()

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
