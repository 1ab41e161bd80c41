"""How the inputs and outputs of ranks stand to the values of the source: what a proof assumes and claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt.analysis.statistic_points import StatisticReduction
from gopt.analysis.synchronised_values import SynchronisedValues
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest import LocalAccumulator, LocalState
from gopt.artifact.pieces import Piece
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

    ``schedule``: phases in order -> number of runs in a step of ``accumulate`` micro-steps."""

    training: TrainingGraph
    mesh: Mesh
    ranks: tuple[RankRelation, ...]
    schedule: Mapping[str, int] = field(default_factory=lambda: {"step": 1})
    accumulate: int = 1
    loss_reduction: str = "mean"
    statistics: str = "mean"
    reductions: tuple[StatisticReduction, ...] = ()
    synchronised: SynchronisedValues = field(default_factory=SynchronisedValues)

    @property
    def local(self) -> frozenset[str]:
        """The statistics that ranks hold apart."""
        states = (state for rank in self.ranks for state in rank.states if state.local)
        return frozenset(state.pieces[0].tensor for state in states)
