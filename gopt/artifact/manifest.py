"""The manifest of an output folder as a record: the files that each rank runs, and the states it holds.

``gopt/schemas/manifest.schema.json`` describes every key. ``manifest_check`` reads the file and checks the conditions
that the schema cannot express.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import StateKind
from gopt.artifact.integrity import FileEntry, sealed
from gopt.artifact.json_writer import pretty_json
from gopt.artifact.pieces import Piece as Piece
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.documents.default_values import DefaultValue
from gopt.documents.draws import Draw
from gopt.documents.records import OPTIONAL, to_document
from gopt.ir.types import TensorType
from gopt.records.boxes import Box, take
from gopt.records.mesh import AxisKind, Mesh

FORMAT = "gopt-manifest/1"
MANIFEST_FILE = "manifest.json"
Shape = tuple[int | str | None, ...]


class InputKind(StrEnum):
    """Kind of an input that is not a state."""

    BATCH = "batch"
    HYPER = "hyper"


@dataclass(frozen=True, slots=True)
class MeshEntry:
    """The mesh in documents. ``kinds`` is absent unless the user declared kinds. ``kinds`` are absent where the user
    said none.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: int
    kinds: Mapping[str, AxisKind] | None = field(default=None, metadata=OPTIONAL)

    @classmethod
    def of(cls, mesh: Mesh) -> MeshEntry:
        return cls(mesh.axes, mesh.ranks, dict(mesh.kinds) or None)

    def mesh(self) -> Mesh:
        """Return the mesh of these axes; raises OptionError if they are invalid."""
        return Mesh.from_record(to_document(self))


@dataclass(frozen=True, slots=True)
class PhaseEntry:
    """A phase of a step, and how often it runs in one."""

    name: str
    times: int


@dataclass(frozen=True, slots=True)
class SourceState:
    """A state of the source: its input, the output that replaces it, and the parameter that it belongs to."""

    tensor: str
    updated: str
    kind: StateKind
    of: str | None
    dtype: str
    shape: Shape | None

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class InputEntry:
    """An input that is not a state."""

    name: str
    dtype: str
    shape: Shape | None
    kind: InputKind
    draw: Draw | None = field(default=None, metadata=OPTIONAL)
    """The distribution that a run draws it from where the data has none; None of inputs that are no random numbers."""

    default: DefaultValue | None = field(default=None, metadata=OPTIONAL)
    """The value of a hyper-parameter where a run sets none; None where one must be set."""

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class OutputEntry:
    """An output that replaces no state."""

    name: str
    dtype: str
    shape: Shape | None


@dataclass(frozen=True, slots=True)
class LocalState:
    """A state as a rank holds it: its pieces, flattened, one after the other."""

    input: str
    output: str
    pieces: tuple[Piece, ...]
    local: bool = field(default=False, metadata=OPTIONAL)
    """Ranks hold different values: a running statistic that is not averaged."""
    copy: bool = field(default=False, metadata=OPTIONAL)
    """A low-precision copy: always the cast of another state of the ranks. On trainers, what servers hold; ``local``
    too: a trainer's own value of it, which goes its own way for some steps."""

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class LocalAccumulator:
    """A sum of gradients that a rank carries from file to file: zero before the first micro-step."""

    input: str
    output: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class FedInput:
    """An input of the batch of which a rank is fed a part: the ``box`` of what ranks with these samples share."""

    input: str
    box: Box


@dataclass(frozen=True, slots=True)
class CommonEntry:
    """Entries that are equal on all ranks."""

    inputs: tuple[InputEntry, ...]
    outputs: tuple[OutputEntry, ...]
    state: tuple[LocalState, ...]


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank: its files by phase, and what it holds beside what all ranks have."""

    rank: int
    role: str
    """``trainer`` or ``server``."""
    files: Mapping[str, str]
    state: tuple[LocalState, ...]
    accumulators: tuple[LocalAccumulator, ...] = field(default=(), metadata=OPTIONAL)
    fed: tuple[FedInput, ...] = field(default=(), metadata=OPTIONAL)
    startup: str | None = field(default=None, metadata=OPTIONAL)
    """The file of its start-up graph, if it has one."""

    def feeds(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the rank's inputs, cut from a whole batch."""
        parts = {each.input: each.box for each in self.fed}
        return {name: take(value, parts.get(name)) for name, value in batch.items()}

    @property
    def inputs(self) -> list[str]:
        """The inputs of its files that hold its own states and accumulators."""
        return [each.input for each in self.state] + [each.input for each in self.accumulators]


@dataclass(frozen=True, slots=True)
class WrittenEntry:
    """SHA-256, in hexadecimal, of a few files: what an older gopt wrote in the place of ``files``."""

    report: str
    states_file: str = field(default="", metadata=OPTIONAL)
    starts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a launcher needs.

    ``phases`` is None if ``step`` is the only phase: see ``schedule``.
    """

    format: str = FORMAT
    accumulate: int = field(default=1, metadata=OPTIONAL)
    phases: tuple[PhaseEntry, ...] | None = field(default=None, metadata=OPTIONAL)
    loss_reduction: str = field(default="mean", metadata=OPTIONAL)
    statistics: str = field(default="mean", metadata=OPTIONAL)
    """``root``: new running statistics are those of the first of the ranks that see different data."""
    reductions: tuple[StatisticReduction, ...] = field(default=(), metadata=OPTIONAL)
    """How the ranks' values of each statistic are combined, where ``statistics`` does not say it of all."""
    synchronised: SynchronisedValues = field(default=SynchronisedValues(), metadata=OPTIONAL)
    mesh: MeshEntry
    split: Mapping[str, str] | None = field(default=None, metadata=OPTIONAL)
    """Axis that splits the computation -> the rule by which parts get their sizes."""
    parameter_server: ServerPlanEntry | None = field(default=None, metadata=OPTIONAL)
    """With trainers and servers: the mesh is that of the trainers, and the servers are ranks behind them."""
    source: str
    startup: str | None = field(default=None, metadata=OPTIONAL)
    """The file of the source's start-up graph, if it has one."""
    loss: str
    more_losses: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    states: tuple[SourceState, ...]
    common: CommonEntry
    ranks: tuple[RankEntry, ...]
    written: WrittenEntry | None = field(default=None, metadata=OPTIONAL)
    """It is read in the folder of an older gopt, and not used."""
    run: str | None = field(default=None, metadata=OPTIONAL)
    """In a folder of checkpoints: the identity of the job whose steps lie there."""
    files: Mapping[str, FileEntry] | None = field(default=None, metadata=OPTIONAL)
    """The other files of the folder. None in a folder of an older gopt, and where values were left out."""
    seal: str | None = field(default=None, metadata=OPTIONAL)
    """SHA-256 of the document before this key."""

    @property
    def losses(self) -> tuple[str, ...]:
        return (self.loss, *self.more_losses)

    @property
    def schedule(self) -> dict[str, int]:
        """The phases in the order in which they run -> how often each runs in one step."""
        return {each.name: each.times for each in self.phases or (PhaseEntry("step", 1),)}

    @property
    def total_ranks(self) -> int:
        """The ranks of the mesh, and the servers behind them."""
        return self.mesh.ranks + (0 if self.parameter_server is None else self.parameter_server.servers)

    def with_trainers(self, count: int) -> Manifest:
        """Return the manifest of a split for another number of trainers; all trainers are equal."""
        trainers = [each for each in self.ranks if each.role == "trainer"]
        if len(trainers) == count:
            return self
        ranks = [trainers[0]] * count + [each for each in self.ranks if each.role != "trainer"]
        mesh = MeshEntry((("dp", count),), count)
        ranks = [replace(each, rank=number) for number, each in enumerate(ranks)]
        plan = self.parameter_server and replace(self.parameter_server, roles=None)  # they are for the old number
        return replace(self, mesh=mesh, parameter_server=plan, ranks=tuple(ranks))

    def states_of(self, rank: RankEntry) -> tuple[LocalState, ...]:
        """All states that a rank holds."""
        return (*self.common.state, *rank.state)

    def next_inputs(self, rank: RankEntry) -> dict[str, str]:
        """Every output of a rank's files that replaces a state or an accumulator -> the input that it replaces."""
        states = {each.output: each.input for each in self.states_of(rank)}
        return states | {each.output: each.input for each in rank.accumulators}

    def inputs_of(self, kind: InputKind) -> list[InputEntry]:
        """The inputs of a kind, in order."""
        return [each for each in self.common.inputs if each.kind is kind]

    @property
    def bare(self) -> Manifest:
        """The manifest without what it says of its files and its job."""
        return replace(self, written=None, run=None, files=None, seal=None)

    @property
    def draws(self) -> dict[str, Draw]:
        """The inputs of random numbers, and what each is drawn from."""
        return {each.name: each.draw for each in self.common.inputs if each.draw is not None}

    @property
    def defaults(self) -> dict[str, DefaultValue]:
        """The hyper-parameters that the step has values for."""
        return {each.name: each.default for each in self.common.inputs if each.default is not None}

    def digest(self) -> str:
        """By it a checkpoint knows the ranks that it is of, from whatever values they start."""
        return hashlib.sha256(json.dumps(self.bare.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The document as it is written."""
        return to_document(self)

    def text(self) -> str:
        """The text of the file; sealed if it lists files."""
        text = pretty_json(replace(self, files=None, seal=None).to_json())
        return text if self.files is None else sealed(text, self.files)
