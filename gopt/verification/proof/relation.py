"""How inputs and outputs of ranks stand to values of the source: the assumptions and claims of a proof."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest_entries import LocalAccumulator, LocalState
from gopt.artifact.pieces import Piece
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.collectives.messages import PUSH, MessageOperator
from gopt.errors import InputError
from gopt.ir.alike_files import shared_parts
from gopt.ir.graph import Graph, Node
from gopt.records.mesh import Mesh
from gopt.verification.proof.result import Claim
from gopt.verification.pulled_types import pulled_types

BY_NUMBERS = "gopt verify compares the ranks by numbers"


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A value of a rank: the ``pieces`` of a value of the source, flattened one after the other; () is all."""

    value: str
    pieces: tuple[Piece, ...] = ()
    how: str = ""
    """Of an output: the sum or the mean of members along ``over``, if any: of the ranks' values, and along data axes of
    the source's."""
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankRelation:
    """The graphs of a rank by phase, and the values of the source behind inputs and outputs.

    ``inputs``: batch, hyper-parameters and stored values. ``outputs``: losses and metrics."""

    rank: int
    graphs: Mapping[str, Graph]
    states: tuple[LocalState, ...]
    inputs: Mapping[str, SourcePart]
    outputs: Mapping[str, SourcePart]
    sums: tuple[LocalAccumulator, ...] = ()
    saved: tuple[str, ...] = ()
    """Values of a micro-batch that a phase leaves for a later one."""
    peers: Mapping[str, int] = field(default_factory=dict)
    """Phase -> the rank with the peers in the graph, if another: peers of this rank are as far from this rank."""

    @property
    def likeness(self) -> Hashable:
        """A key of ranks with the same expressions: the same parts of graphs and records of states, by identity."""
        graphs = [(phase, *shared_parts(graph)) for phase, graph in self.graphs.items()]
        parts = [frozenset(of.items()) for of in (self.inputs, self.outputs)]
        return tuple(graphs), *parts, tuple(map(id, self.states)), self.sums

    @property
    def next_inputs(self) -> dict[str, str]:
        """Output in place of a state or an accumulator -> the replaced input."""
        carried: tuple[LocalState | LocalAccumulator, ...] = (*self.states, *self.sums)
        return {entry.output: entry.input for entry in carried}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRelation:
    """The source, the ranks on a mesh, and how gradients and statistics of ranks with different data combine.

    ``schedule``: phases in order -> number of runs in a step of ``accumulate`` micro-steps. ``plan``: of trainers, the
    ranks of the mesh, and servers, all other ranks."""

    training: TrainingGraph
    mesh: Mesh
    ranks: tuple[RankRelation, ...]
    schedule: Mapping[str, int] = field(default_factory=lambda: {"step": 1})
    accumulate: int = 1
    loss_reduction: str = "mean"
    reduce_dtype: str = ""
    """The type in which gradients travel between ranks; '' for their own."""
    statistics: str = "mean"
    reductions: tuple[StatisticReduction, ...] = ()
    alike: frozenset[str] = frozenset()
    """Inputs of the batch that all ranks have alike."""
    leaves: tuple[str, ...] = ()
    """Values in front of the source's update without an expression of operands (``unchanged_nodes``)."""
    remedy: str = ""
    """The hint for a file unlike the relation."""
    instead: str = ""
    """The hint for a file that no law decides."""
    claims: tuple[Claim, ...] = ()
    """Claims on stored values, compared without a proof."""
    synchronised: SynchronisedValues = field(default_factory=SynchronisedValues)
    plan: ServerPlanEntry | None = None

    @property
    def wire(self) -> Mapping[str, tuple[str, str]]:
        """Tensor -> type on servers, and another type on the way to trainers."""
        return pulled_types(self.plan, self.ranks[0].graphs.values())

    @property
    def pushed(self) -> Mapping[str, str]:
        """Parameter -> the type of the gradient on the way to servers, if also the type on the way to trainers."""
        buckets = {} if self.plan is None else self.plan.buckets
        types = {node.attributes["bucket"]: graph.type_of(node.inputs[2]).dtype for graph, node in self._messages(PUSH)}
        sent = [key for bucket, dtype in types.items() for key in buckets[bucket] if key.wire == dtype]
        return {piece.tensor: key.wire for key in sent for piece in key.pieces}

    def _messages(self, message: MessageOperator) -> Iterator[tuple[Graph, Node]]:
        """The messages of a kind in the graphs of a trainer."""
        graphs = self.ranks[0].graphs.values() if self.plan is not None else ()
        return ((graph, node) for graph in graphs for node in graph.nodes if node.op_type == message.name)

    @property
    def constants(self) -> frozenset[str]:
        """The stored values of the source behind inputs or stored values of ranks."""
        values = {part.value for rank in self.ranks for part in rank.inputs.values()}
        values |= {piece.tensor for rank in self.ranks for part in rank.inputs.values() for piece in part.pieces}
        return frozenset(values.difference(self.training.batch, self.training.hyper, self.leaves))

    @property
    def local(self) -> frozenset[str]:
        """The statistics with different values on ranks."""
        states = (state for rank in self.ranks for state in rank.states if state.local)
        return frozenset(state.pieces[0].tensor for state in states)


def check_versions(graph: Graph, path: str | os.PathLike[str], source: Graph, hint: str) -> None:
    """Raise InputError for another version of operators than the source's: operators may compute something else."""
    versions = {entry.domain: entry.version for entry in source.header.opset_import}
    for entry in graph.header.opset_import:
        if versions.get(entry.domain, entry.version) != entry.version:
            raise InputError(f"{path} is of operator set {entry.version}, the source of {versions[entry.domain]}", hint)
