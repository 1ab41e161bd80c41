"""How the inputs and outputs of ranks stand to the values of the source: what a proof assumes and claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest import LocalAccumulator, LocalState
from gopt.artifact.pieces import Piece
from gopt.artifact.server_entries import ServerPlanEntry
from gopt.collectives.messages import PUSH
from gopt.ir.graph import Graph
from gopt.records.mesh import Mesh


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A value of a rank: a value of the source, of which ``pieces`` are flattened one after the other; () is all."""

    value: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class RankRelation:
    """The graphs of a rank by phase, and the values of the source that the inputs and outputs are.

    ``inputs``: batch and hyper-parameters. ``outputs``: losses and metrics."""

    rank: int
    graphs: Mapping[str, Graph]
    states: tuple[LocalState, ...]
    inputs: Mapping[str, SourcePart]
    outputs: Mapping[str, SourcePart]
    sums: tuple[LocalAccumulator, ...] = ()

    @property
    def next_inputs(self) -> dict[str, str]:
        """Output that replaces a state or an accumulator -> the replaced input."""
        carried: tuple[LocalState | LocalAccumulator, ...] = (*self.states, *self.sums)
        return {entry.output: entry.input for entry in carried}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRelation:
    """The source, its ranks on a mesh, and how gradients and statistics of ranks with different data combine.

    ``schedule``: phases in order -> number of runs in a step of ``accumulate`` micro-steps. ``plan``: of trainers, the
    ranks of the mesh, and servers, all other ranks."""

    training: TrainingGraph
    mesh: Mesh
    ranks: tuple[RankRelation, ...]
    schedule: Mapping[str, int] = field(default_factory=lambda: {"step": 1})
    accumulate: int = 1
    loss_reduction: str = "mean"
    statistics: str = "mean"
    reductions: tuple[StatisticReduction, ...] = ()
    synchronised: SynchronisedValues = field(default_factory=SynchronisedValues)
    plan: ServerPlanEntry | None = None

    @property
    def wire(self) -> Mapping[str, tuple[str, str]]:
        """Tensor -> type on servers, and another type on the way to trainers."""
        keys = () if self.plan is None else self.plan.keys
        return {piece.tensor: (key.dtype, key.wire) for key in keys for piece in key.pieces if key.wire != key.dtype}

    @property
    def pushed(self) -> Mapping[str, str]:
        """Parameter -> the type of the gradient on the way to servers, if also the type on the way to trainers."""
        graphs = self.ranks[0].graphs.values() if self.plan is not None else ()
        buckets = {} if self.plan is None else self.plan.buckets
        types = {
            node.attributes["bucket"]: graph.type_of(node.inputs[2]).dtype
            for graph in graphs for node in graph.nodes if node.op_type == PUSH.name
        }  # fmt: skip
        sent = [key for bucket, dtype in types.items() for key in buckets[bucket] if key.wire == dtype]
        return {piece.tensor: key.wire for key in sent for piece in key.pieces}

    @property
    def local(self) -> frozenset[str]:
        """The statistics that ranks hold apart."""
        states = (state for rank in self.ranks for state in rank.states if state.local)
        return frozenset(state.pieces[0].tensor for state in states)
