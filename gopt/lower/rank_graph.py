"""Records of a rank: nodes, states, accumulators and constants; built by ``specialise``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from onnx import FunctionProto

from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.lower.phases import LoweredPhase
from gopt.records.boxes import Box


@dataclass(frozen=True, slots=True)
class ShardRange:
    """An element range of a source tensor, or of a ``box`` of a tensor."""

    tensor: str
    start: int
    stop: int
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class RankState:
    """A state on a rank: its pieces, flattened, one after the other."""

    input: str
    output: str
    type: TensorType
    pieces: tuple[ShardRange, ...]
    local: bool = False
    copy: bool = False

    @property
    def stored(self) -> str:
        """The name of the stored values: its own for a copy, else the first piece's tensor."""
        return self.input if self.copy else self.pieces[0].tensor


@dataclass(frozen=True, slots=True)
class RankAccumulator:
    """An accumulator on a rank: zero before the first micro-step."""

    input: str
    output: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class RankSaved:
    """A value of a micro-batch left on a rank for a later phase: an output, and there an input."""

    input: str
    type: TensorType

    @property
    def output(self) -> str:
        return self.input


@dataclass(frozen=True, slots=True, eq=False)
class RankBlock:
    """Consecutive nodes. Ranks with the same nodes share a block."""

    nodes: tuple[Node, ...]
    shared: bool
    """Every rank has it."""
    calls: tuple[Node, ...]
    """The collectives among the nodes."""

    @classmethod
    def of(cls, nodes: tuple[Node, ...], *, shared: bool) -> RankBlock:
        return cls(nodes, shared, tuple(node for node in nodes if node.domain == COMM))


@dataclass(slots=True)
class RankGraph:
    """A phase of a rank's step. ``states``: the rank's own states, beside the states of all ranks; ``accumulators``:
    the sums. A phase reads and writes states that are inputs and outputs of its graph."""

    rank: int
    phase: LoweredPhase
    blocks: list[RankBlock]
    states: list[RankState]
    accumulators: list[RankAccumulator] = field(default_factory=list)
    saved: list[RankSaved] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    """Local types of values that ranks have parts of."""
    functions: list[FunctionProto] = field(default_factory=list)
    """Bodies of the opaque operators among the nodes."""
    like: RankGraph | None = None
    """The graph with the same content but for the numbers of peers: the peers of ``like.rank``."""

    def __repr__(self) -> str:
        count = sum(len(block.nodes) for block in self.blocks)
        return f"<RankGraph of rank {self.rank}, {self.phase.name}: {count} nodes, {len(self.own)} own states>"

    @property
    def nodes(self) -> list[Node]:
        """All nodes in order. Built on every call, in time linear in the graph: prefer blocks or calls."""
        return [node for block in self.blocks for node in block.nodes]

    def graph(self) -> Graph:
        """The phase as a graph of this rank alone, made anew. Inputs, outputs and values are the phase's."""
        whole = self.phase.graph
        constants = {
            name: Tensor(TensorType(array.dtype.name, array.shape), array=array)
            for name, array in self.constants.items()
        }
        return Graph(
            whole.name, self.nodes, dict(whole.inputs), dict(whole.outputs), whole.initializers | constants,
            whole.types | self.types, whole.header,
        )  # fmt: skip

    @property
    def calls(self) -> Iterator[Node]:
        """The collectives in order."""
        return (node for block in self.blocks for node in block.calls)

    @property
    def content(self) -> int:
        """A number common to graphs that ``specialise`` made once for several ranks."""
        return id(self.blocks)

    @property
    def kind(self) -> int:
        """A number common to graphs with the same content but for the numbers of peers."""
        return id((self.like or self).blocks)

    @property
    def own(self) -> list[RankState | RankAccumulator | RankSaved]:
        """Everything carried from file to file by the rank alone, beside values of all ranks."""
        return [*self.states, *self.accumulators, *self.saved]


def alike(ranks: Iterable[RankGraph]) -> list[list[RankGraph]]:
    """Graphs of one content together, in the order of their lowest ranks."""
    graphs: dict[int, list[RankGraph]] = {}
    for rank in ranks:
        graphs.setdefault(rank.content, []).append(rank)
    return list(graphs.values())
