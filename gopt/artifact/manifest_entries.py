"""The entries of a manifest: mesh, phases, states, inputs and outputs, and the files and pieces of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import numpy as np

from gopt.analysis.training import StateKind
from gopt.artifact.pieces import Piece as Piece
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import (
    OPTIONAL,
    Bounds,
    Count,
    Digest,
    Positive,
    one_of,
    to_document,
)
from gopt.ir.types import TensorType
from gopt.records.boxes import Box, take
from gopt.records.mesh import AxisKind, Mesh
from gopt.records.pass_facts import SIZES

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
    """The kinds say what the ranks along an axis see of the data, for the axes that the user described; the key is
    absent without such axes. The value is data where the ranks along the axis see samples of their own, and replica
    where they see the same samples."""

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
class PipelineEntry:
    """The stages of a pipeline, and the order of micro-batches."""

    stages: Positive
    """The step is cut into this many stages along the axis pp."""
    schedule: str | None = field(default=None, metadata=OPTIONAL)
    """The file of this name says in which order each member of the axis runs the phases of the micro-batches
    (schedules.md); the key is absent when a step has a single micro-batch."""


class Typed:
    """An entry with elements of one type, and a shape."""

    __slots__ = ()
    dtype: str
    shape: Shape | None

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class ValueEntry(Typed):
    """A value of the rank's files."""

    name: str
    """The value has this name."""
    dtype: str
    """The elements of the value have this type."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown. An integer is
    the length of the dimension, a string is the name of a length that the source leaves open, and null is an unknown
    length."""


@dataclass(frozen=True, slots=True)
class SourceState(Typed):
    """A state of the source: its input, the output replacing it, and the parameter it belongs to."""

    tensor: str
    """The state is the input of this name of the source."""
    updated: str
    """The output of this name of the source replaces the state."""
    kind: StateKind
    """The kind is the state's, in the words of the glossary."""
    of: str | None
    """The state belongs to the parameter of this name; null means that it is a parameter itself, or belongs to none."""
    dtype: str
    """The elements of the state have this type."""
    shape: Shape | None
    """The shape is the list of the lengths of the dimensions, in elements; null means that it is unknown. An integer is
    the length of the dimension, a string is the name of a length that the source leaves open, and null is an unknown
    length."""


@dataclass(frozen=True, slots=True)
class InputEntry(ValueEntry):
    """An input that is not a state."""

    kind: InputKind
    """The kind is batch for an input that belongs to the batch, and hyper for a hyper-parameter."""
    draw: Draw | None = field(default=None, metadata=OPTIONAL)
    """The input is of random numbers, which a run draws from this where the data has none; the key is absent for other
    inputs."""

    default: DefaultValue | None = field(default=None, metadata=OPTIONAL)
    """The value of the hyper-parameter where a run sets none; the key is absent where one must be set."""


@dataclass(frozen=True, slots=True)
class OutputEntry(ValueEntry):
    """An output replacing no state."""


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
    """The value is true where the state is a copy, always equal to another state of the ranks, or to its cast: in low
    precision, or on another pipeline stage; the key is absent otherwise."""

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class LocalAccumulator(Typed):
    """A sum of gradients a rank carries from file to file: zero before the first micro-step."""

    input: str
    """The files of the rank read the accumulator as the input of this name."""
    output: str
    """The files of the rank return the new accumulator as the output of this name."""
    dtype: str
    """The elements of the accumulator have this type."""
    shape: tuple[Count, ...]
    """The shape is the list of the lengths of the dimensions, in elements."""


@dataclass(frozen=True, slots=True)
class SavedValue(ValueEntry):
    """A value of a micro-batch carried from an earlier file of a rank to a later file."""

    name: str
    """An earlier file of the rank returns the value as the output of this name, and a later file reads the input of
    this name."""


@dataclass(frozen=True, slots=True)
class FedInput:
    """An input of the batch, fed to a rank in part: the ``box`` of what ranks with these samples share."""

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
    """The list has the states that the rank holds beside the states of common: shards, and whole states that
    the rank owns."""
    accumulators: tuple[LocalAccumulator, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the accumulators of the rank, sums of gradients that it carries from file to file and that are zero
    before the first micro-step; the key is absent when the rank has none."""
    saved: tuple[SavedValue, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the values that the forward of a micro-batch leaves for its backward, where the ranks are stages of
    a pipeline; the key is absent when the rank has none."""
    fed: tuple[FedInput, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the inputs of the batch that the rank is fed in part, where an axis of the mesh shares samples
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
