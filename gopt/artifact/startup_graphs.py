"""Start-up graphs compute first values of states: ``startup.onnx`` for the source, ``rank_0000.startup.onnx`` for a
rank, ``trainer.startup.onnx`` and ``server_0000.startup.onnx`` for trainers and a server. Start-up graphs have no
inputs; an output is named after its state.

A rank's graph has the nodes behind the rank's states, and slices the results. A state with some computed tensors takes
the others from ``states.bin``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from gopt.artifact.integrity import Inventory
from gopt.artifact.manifest import Manifest
from gopt.artifact.pieces import Piece, place_shape
from gopt.artifact.serialize import model_bytes
from gopt.artifact.states_file import STATES_FILE, StatesFile
from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import walk
from gopt.ir.tape import Tape
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.lower.rank_graph import RankGraph, RankState, ShardRange
from gopt.records.boxes import box_shape, ranges_of
from gopt.records.mesh import Mesh

STARTUP_FILE = "startup.onnx"
FORMAT = "gopt-startup/1"
_NAME = "gopt.startup"


@dataclass(frozen=True, slots=True)
class StartupFile:
    """The start-up graph of a rank, or of several equal ranks. ``parts``: state -> the piece of a tensor, if not known
    from the state's pieces."""

    name: str
    ranks: tuple[int, ...]
    metadata: Mapping[str, str]
    states: Sequence[RankState]
    parts: Mapping[str, Piece] = field(default_factory=dict)

    @classmethod
    def of(
        cls, startup: Graph, name: str, ranks: Iterable[int], metadata: Mapping[str, str], stored: Iterable[RankState],
        parts: Mapping[str, Piece] = MappingProxyType({}),
    ) -> StartupFile:  # fmt: skip
        """The file for the states with elements computed by the source's start-up graph."""
        states = [state for state in stored if any(piece.tensor in startup.outputs for piece in state.pieces)]
        return cls(name, tuple(ranks), metadata, states, parts)


def files_of_ranks(
    startup: Graph, mesh: Mesh, common: Sequence[RankState], ranks: Iterable[RankGraph]
) -> list[StartupFile]:
    """The start-up graphs of ranks, equal in all phases; ``common``: states held by all ranks."""
    shared = StartupFile.of(startup, "", (), {}, common).states
    return [
        StartupFile.of(
            startup, f"rank_{rank.rank:04d}.startup.onnx", [rank.rank],
            {"gopt.mesh": str(mesh), "gopt.rank": str(rank.rank)}, [*shared, *rank.states],
        )
        for rank in {rank.rank: rank for rank in ranks}.values()
    ]  # fmt: skip


def write_startup(
    inventory: Inventory,
    startup: Graph,
    types: Mapping[str, TensorType],
    values: StatesFile,
    files: Iterable[StartupFile],
) -> None:
    """Write the start-up graph of the source, with values of these types, and the ranks' graphs. Raises OSError."""
    with inventory.create(STARTUP_FILE) as written:
        written.write(model_bytes(startup, {}, "", {"gopt.format": FORMAT}))
    writer = _Writer(startup, types, values)
    for file in files:
        if file.states:
            graph, offsets = writer.graph(file)
            metadata = {"gopt.format": FORMAT, **file.metadata}
            with inventory.create(file.name) as written:
                written.write(model_bytes(graph, offsets, STATES_FILE, metadata))


def with_startup(manifest: Manifest, files: Iterable[StartupFile]) -> Manifest:
    """The manifest with the files of ``write_startup``."""
    names = {rank: file.name for file in files if file.states for rank in file.ranks}
    entries = tuple(replace(rank, startup=names.get(rank.rank)) for rank in manifest.ranks)
    return replace(manifest, startup=STARTUP_FILE, ranks=entries)


class _Writer:
    """Makes the graphs of ranks; each takes time for its states, not for the whole start-up graph."""

    def __init__(self, startup: Graph, types: Mapping[str, TensorType], values: StatesFile) -> None:
        self.startup, self.types, self.values = startup, types, values
        self._place = {name: index for index, node in enumerate(startup.nodes) for name in node.outputs}

    def graph(self, file: StartupFile) -> tuple[Graph, dict[str, int]]:
        """The graph for states of a rank, and the offset of stored values in ``states.bin``."""
        part = _RankPart(self.startup.outputs, self.types, self.values)
        for state in file.states:
            part.add(state, file.parts.get(state.input))
        nodes, stored = self._needed(part.read), self.startup.initializers
        read = dict.fromkeys(name for node in nodes for name in node.reads if name in stored)
        graph = replace(
            self.startup, nodes=[*part.renamed(nodes), *part.nodes],
            outputs={state.input: state.type for state in file.states},
            initializers={name: stored[name] for name in read} | part.constants,
        )  # fmt: skip
        return graph, part.offsets

    def _needed(self, names: Iterable[str]) -> list[Node]:
        """The nodes behind these values, in order."""

        def following(index: int) -> Iterator[int]:
            return (self._place[name] for name in self.startup.nodes[index].reads if name in self._place)

        return [self.startup.nodes[index] for index in sorted(walk((self._place[name] for name in names), following))]


class _RankPart(Tape):
    """The nodes of a rank's graph behind the nodes computing whole tensors."""

    def __init__(self, computed: Container[str], types: Mapping[str, TensorType], values: StatesFile) -> None:
        self.computed, self.types, self.values = computed, types, values
        self.nodes: list[Node] = []
        self.constants: dict[str, Tensor] = {}
        self.offsets: dict[str, int] = {}
        self.read: set[str] = set()
        """Tensors of the source that are computed here."""

    def renamed(self, nodes: Sequence[Node]) -> list[Node]:
        """The nodes, with new names for computed tensors: a state of the rank may have the same name.

        An Identity makes each such tensor, unread by nodes of the start-up graph.
        """
        renamed = []
        for node in nodes:
            if not self.read.isdisjoint(node.outputs):
                node = Node(node.op_type, node.inputs, [_whole(name) for name in node.outputs], name=node.name)
            renamed.append(node)
        return renamed

    def add(self, state: RankState, part: Piece | None = None) -> None:
        """Compute a state from the pieces, or as ``part`` of a tensor."""
        flat, start = [], 0
        for piece in state.pieces if part is None else ():
            count = piece.stop - piece.start
            is_computed = piece.tensor in self.computed
            flat.append(self._computed(piece, state) if is_computed else self._stored(state, start, count))
            start += count
        if part is not None:
            flat.append(self._computed(part, state))
        joined = flat[0] if len(flat) == 1 else self.op("Concat", *flat, axis=0)
        self.reshape(joined, state.type.dims, output=state.input)

    def _computed(self, piece: ShardRange | Piece, state: RankState) -> str:
        """The flat elements of a piece of a tensor made by the start-up graph."""
        self.read.add(piece.tensor)
        name, type = _whole(piece.tensor), self.types[piece.tensor]
        shape = type.dims
        if piece.box is not None:
            name = self.reshape(name, shape)
            for axis, ends in enumerate(piece.box):
                if tuple(ends) != (0, shape[axis]):
                    parts = [self.slice(name, start, stop, axis) for start, stop in ranges_of(ends)]
                    name = parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=axis)
            shape = box_shape(piece.box)
        if isinstance(piece, Piece) and piece.every is not None:
            offset, step = piece.every
            name = self.slice(name, offset, shape[0], 0, step)
            shape = place_shape(piece.place, shape)
        flat = self.reshape(name, [-1])
        if (piece.start, piece.stop) != (0, int(np.prod(shape))):
            flat = self.slice(flat, piece.start, piece.stop, 0)
        return self.cast(flat, state.type.dtype, type.dtype)

    def _stored(self, state: RankState, start: int, count: int) -> str:
        """Elements of a state from ``states.bin``."""
        name = f"{_NAME}.stored.{state.input}"
        if name not in self.offsets:
            if not self.values.has(state):
                raise UnsupportedError(
                    f"state {state.input!r} has no value for what the start-up graph does not compute",
                    "give the values with --state FILE, or compute all of them",
                )
            self.offsets[name] = self.values.start_of(state)
            self.constants[name] = Tensor(TensorType(state.type.dtype, (state.type.elements,)))
        return self.slice(name, start, start + count, 0)

    def constant(self, value: np.ndarray) -> str:
        name = f"{_NAME}.{'_'.join(map(str, value.tolist())) or 'scalar'}"
        self.constants[name] = Tensor(TensorType("int64", value.shape), array=value)
        return name

    def append(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any]) -> None:
        self.nodes.append(Node(op_type, inputs, outputs, attributes=attributes))

    def new_name(self) -> str:
        return f"{_NAME}.value.{len(self.nodes)}"


def _whole(tensor: str) -> str:
    """The name of a computed tensor of the source in a rank's graph."""
    return f"{_NAME}.whole.{tensor}"
