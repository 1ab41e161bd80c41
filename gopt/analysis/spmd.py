"""The rank-independent step: one graph with placements, and what every rank holds of each state."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.analysis.training import Training
from gopt.graph.model import Graph
from gopt.graph.place import EVERYWHERE, Owner, Place, Span
from gopt.mesh import DATA_AXES, Mesh

SHARD_AXIS = "shard"


@dataclass(frozen=True, slots=True)
class Part:
    """A source tensor inside a bucket: where it starts, and how many elements it has."""

    tensor: str
    offset: int
    elements: int


@dataclass(frozen=True, slots=True)
class Holding:
    """A state as the ranks hold it.

    ``place`` Everywhere or Owner: the whole tensor ``parts[0]``. ``place`` a Span: each rank's run of the parts,
    flattened, as one 1-D tensor.
    """

    input: str
    output: str
    dtype: str
    parts: tuple[Part, ...]
    place: Place = EVERYWHERE
    local: bool = False
    copy: bool = False
    """A narrow replica of ``parts[0]``: always the wide state's cast."""

    @property
    def sharded(self) -> bool:
        return isinstance(self.place, (Span, Owner))


@dataclass(slots=True)
class Step:
    """What the passes work on: the source's roles, the graph they rewrite, and the mesh.

    ``holdings`` are in the order of the source's states; ``layout`` lists the sequences in which values are stored.
    """

    training: Training
    graph: Graph
    mesh: Mesh
    holdings: list[Holding]
    layout: list[tuple[str, ...]] = field(default_factory=list)
    applied: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, training: Training, mesh: Mesh) -> Step:
        """Every state whole on every rank, the graph a copy of the source."""
        types = training.graph.types
        holdings = [
            Holding(s.tensor, s.updated, types[s.tensor].dtype, (Part(s.tensor, 0, types[s.tensor].elements),))
            for s in training.states
        ]
        step = cls(training, training.graph.copy(), mesh, [])
        step.hold(holdings)
        return step

    def hold(self, holdings: list[Holding]) -> None:
        """Take ``holdings`` as what the ranks hold, and let the graph's inputs and outputs follow."""
        source, types = self.training.graph, self.graph.types
        states = {state.tensor for state in self.training.states}
        given = {state.updated for state in self.training.states}
        self.holdings = holdings
        self.graph.inputs = {name: type for name, type in source.inputs.items() if name not in states}
        self.graph.outputs = {name: type for name, type in source.outputs.items() if name not in given}
        for holding in holdings:
            self.graph.inputs[holding.input] = types[holding.input]
            self.graph.outputs[holding.output] = types[holding.output]
        self.graph.initializers = {name: tensor for name, tensor in source.initializers.items() if name not in states}

    @property
    def group(self) -> str:
        """The sharding group."""
        return SHARD_AXIS

    def copies(self) -> dict[str, Holding]:
        """Narrow replicas by parameter."""
        return {holding.parts[0].tensor: holding for holding in self.holdings if holding.copy}

    @property
    def outer(self) -> str | None:
        """The group of data axes beside the sharding one, over which shards of gradients are averaged; or None."""
        axes = [name for name, _ in self.mesh.axes if name in DATA_AXES and name != SHARD_AXIS]
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
