"""The rank-independent step: one graph with placements, and what every rank holds of each state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gopt.analysis.loss_reduction import LossReduction
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.mesh import Mesh
from gopt.sharding.placements import REPLICATED, FlatShard, OnMember, Place

SHARD_AXIS = "shard"


@dataclass(frozen=True, slots=True)
class BucketSlice:
    """A source tensor inside a bucket: where it starts, and how many elements it has."""

    tensor: str
    offset: int
    elements: int


@dataclass(frozen=True, slots=True)
class ShardedState:
    """A state as the ranks hold it.

    ``place`` Replicated or OnMember: the whole tensor ``parts[0]``. ``place`` a FlatShard: each rank's run of the
    parts, flattened, as one 1-D tensor.
    """

    input: str
    output: str
    dtype: str
    slices: tuple[BucketSlice, ...]
    place: Place = REPLICATED
    local: bool = False
    copy: bool = False
    """A narrow replica of ``parts[0]``: always the wide state's cast."""

    @property
    def sharded(self) -> bool:
        return isinstance(self.place, (FlatShard, OnMember))


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A sum of gradients that a rank carries through the micro-steps of an update: zero before the first of them.

    ``input`` -> ``output`` in both phases: ``added`` is its value after a micro-step, ``output`` itself the zeros that
    the update leaves. ``cuts``: each member holds its part of a bucket, 1-D; None: the whole tensor, where ``place``
    says.
    """

    input: str
    output: str
    added: str
    dtype: str
    shape: tuple[int, ...] = ()
    cuts: tuple[int, ...] | None = None
    place: Place = REPLICATED
    reduced: bool = False
    """It sums what is equal on all ranks, such as weights that are reduced in each micro-step."""

    def type(self, member: int) -> TensorType:
        """Its type on a member of the sharding group."""
        if self.cuts is None:
            return TensorType(self.dtype, self.shape)
        return TensorType(self.dtype, (self.cuts[member + 1] - self.cuts[member],))


@dataclass(slots=True)
class SpmdProgram:
    """What the passes work on: the source's roles, the graph they rewrite, and the mesh.

    ``holdings`` are in the order of the source's states; ``layout`` lists the sequences in which values are stored.
    ``micro_steps`` forwards and backwards make one update; when there are several, ``accumulators`` carry the
    gradients, and ``carried`` names what a micro-step makes of a state that it changes (a statistic): input -> value.
    """

    training: TrainingGraph
    graph: Graph
    mesh: Mesh
    states: list[ShardedState]
    layout: list[tuple[str, ...]] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)
    micro_steps: int = 1
    accumulators: list[Accumulator] = field(default_factory=list)
    loop_carried: dict[str, str] = field(default_factory=dict)
    loss_reduction: LossReduction = field(default_factory=LossReduction)
    """How the ranks' gradients become the step's."""
    shared: dict[str, Any] = field(default_factory=dict)
    """What ranks average in the forward and the backward, as the manifest has it; empty: nothing."""

    def __repr__(self) -> str:
        did = f"{len(self.graph.nodes)} nodes, {len(self.applied)} passes applied"
        return f"<Step {self.graph.name} on {self.mesh}: {did}>"

    @classmethod
    def start(cls, training: TrainingGraph, mesh: Mesh, micro_steps: int = 1) -> SpmdProgram:
        """Every state whole on every rank, the graph a copy of the source."""
        types = training.graph.types
        states = [
            ShardedState(
                s.tensor, s.updated, types[s.tensor].dtype, (BucketSlice(s.tensor, 0, types[s.tensor].elements),)
            )
            for s in training.states
        ]
        program = cls(training, training.graph.copy(), mesh, [], micro_steps=micro_steps)
        program.set_states(states)
        return program

    def set_states(self, states: list[ShardedState]) -> None:
        """Take ``holdings`` as what the ranks hold, and let the graph's inputs and outputs follow."""
        source, types = self.training.graph, self.graph.types
        inputs = {state.tensor for state in self.training.states}
        outputs = {state.updated for state in self.training.states}
        self.states = states
        self.graph.inputs = {name: type for name, type in source.inputs.items() if name not in inputs}
        self.graph.outputs = {name: type for name, type in source.outputs.items() if name not in outputs}
        for state in states:
            self.graph.inputs[state.input] = types[state.input]
            self.graph.outputs[state.output] = types[state.output]
        for held in self.accumulators:
            self.graph.inputs[held.input] = types[held.input]
            self.graph.outputs[held.output] = types[held.output]
        self.graph.initializers = {name: tensor for name, tensor in source.initializers.items() if name not in inputs}

    def results(self) -> set[str]:
        """Every value that leaves the step, or goes from one of its phases into the next."""
        names = {self.training.loss, *self.training.metrics, *self.loop_carried.values()}
        names.update(state.output for state in self.states)
        return names.union(*((held.output, held.added) for held in self.accumulators))

    @property
    def group(self) -> str:
        """The sharding group."""
        return SHARD_AXIS

    def copies(self) -> dict[str, ShardedState]:
        """Narrow replicas by parameter."""
        return {state.slices[0].tensor: state for state in self.states if state.copy}

    @property
    def outer(self) -> str | None:
        """The group of data axes beside the sharding one, over which shards of gradients are averaged; or None."""
        axes = [name for name in self.mesh.data_axes if name != SHARD_AXIS]
        group = "+".join(axes)
        return group if axes and self.mesh.size(group) > 1 else None

    @property
    def sharding(self) -> bool:
        """Whether the mesh has a sharding axis."""
        return any(name == SHARD_AXIS for name, _ in self.mesh.axes)

    @property
    def members(self) -> int:
        """Ranks that share states."""
        return self.mesh.size(self.group) if self.sharding else 1
