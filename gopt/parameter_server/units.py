"""Units of a split: the parts updated as one by a server. A unit is a run of pieces with alike updates, or whole
tensors with uncuttable updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.updates import UpdateMode, Updates, UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex
from gopt.parameter_server.components import components
from gopt.parameter_server.options import SplitOptions


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """Elements ``start`` to ``stop`` of a parameter, and of its states of the same shape; ``index``: among its pieces;
    ``whole``: it is the only one."""

    parameter: str
    index: int
    start: int
    stop: int
    server: int
    whole: bool

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ServerUnit:
    """A unit, which a server updates as one; ``server`` None: every server does.

    Split: ``pieces``, one of each of ``subgraphs``, are stored one after the other. Whole: tensors as they are.
    """

    number: int
    server: int | None
    split: bool
    subgraphs: tuple[UpdateSubgraph, ...]
    pieces: tuple[PlacedPiece, ...]
    ready: int
    """Place of the node that completes the last gradient."""
    nbytes: int
    """Bytes of the gradients."""
    dtypes: tuple[str, str, str]
    """Of gradients, of parameters, and of parameters as trainers pull them."""

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Return the gradients of a whole unit, each once."""
        return tuple(dict.fromkeys(subgraph.gradient for subgraph in self.subgraphs))


def make_units(
    training: TrainingGraph, updates: Updates, owners: Mapping[str, tuple[PlacedPiece, ...]], options: SplitOptions,
    narrow: Mapping[str, str],
) -> list[ServerUnit]:  # fmt: skip
    """The units of placed pieces, in the order in which their gradients are complete; ``narrow``: as in
    ``ServerPlan``."""
    units = _UnitMaker(training, updates, owners, options, narrow).all()
    ordered = sorted(units, key=lambda unit: (unit.ready, -1 if unit.server is None else unit.server))
    return [replace(unit, number=number) for number, unit in enumerate(ordered)]


@dataclass
class _UnitMaker:
    training: TrainingGraph
    updates: Updates
    owners: Mapping[str, tuple[PlacedPiece, ...]]
    options: SplitOptions
    narrow: Mapping[str, str]

    def all(self) -> Iterator[ServerUnit]:
        """Yield every unit, in no particular order; their numbers are not set."""
        index = GraphIndex(self.training.graph)
        runs: dict[tuple[object, ...], list[tuple[int, PlacedPiece]]] = {}
        together = components(self.updates)
        for name, subgraph in self.updates.subgraphs.items():
            ready = index.defined_at(subgraph.gradient)
            if subgraph.mode is UpdateMode.SPLIT:
                for piece in self.owners[name]:
                    key = (piece.server, subgraph.equivalence_class, *self._dtypes(subgraph))
                    runs.setdefault(key, []).append((ready, piece))
            elif together.get(name, (name,))[0] == name:
                yield from self._whole([self.updates.subgraphs[name] for name in together.get(name, (name,))], index)
        for run in runs.values():
            run.sort(key=lambda item: (item[0], item[1].index))
            yield from (self._run(chunk) for chunk in self._chunks(run))

    def _chunks(self, run: Sequence[tuple[int, PlacedPiece]]) -> Iterator[list[tuple[int, PlacedPiece]]]:
        """Yield runs of pieces for possible units: single pieces with updates on arrival, else up to the cap."""
        width = self._nbytes(run[0][1]) / max(run[0][1].elements, 1)
        chunk: list[tuple[int, PlacedPiece]] = []
        total = 0.0
        for item in run:
            nbytes = item[1].elements * width
            if chunk and (not self.options.mode.rounds or total + nbytes > self.options.cap):
                yield chunk
                chunk, total = [], 0.0
            chunk.append(item)
            total += nbytes
        yield chunk

    def _run(self, chunk: Sequence[tuple[int, PlacedPiece]]) -> ServerUnit:
        subgraphs = tuple(self.updates.subgraphs[piece.parameter] for _, piece in chunk)
        placed = tuple(piece for _, piece in chunk)
        nbytes = sum(map(self._nbytes, placed))
        ready = max(at for at, _ in chunk)
        return ServerUnit(0, placed[0].server, True, subgraphs, placed, ready, nbytes, self._dtypes(subgraphs[0]))

    def _whole(self, subgraphs: Sequence[UpdateSubgraph], index: GraphIndex) -> Iterator[ServerUnit]:
        """Yield the units of updates running as one: a message is of one type, so each pair of types has its own."""
        if not self.options.mode.rounds:  # each is updated by itself, so it takes what it alone reads along
            subgraphs = self._closed(subgraphs, index)
        server = None if self._seen_outside(subgraphs) else self._placed(subgraphs[0]).server
        alike: dict[tuple[str, str, str], list[UpdateSubgraph]] = {}
        for subgraph in subgraphs:
            alike.setdefault(self._dtypes(subgraph), []).append(subgraph)
        types = self.training.graph.types
        for dtypes, group in alike.items():
            gradients = dict.fromkeys(member.gradient for member in group)
            ready = max(index.defined_at(name) for name in gradients)
            nbytes = sum(types[name].nbytes for name in gradients)
            yield ServerUnit(0, server, False, tuple(group), tuple(map(self._placed, group)), ready, nbytes, dtypes)

    def _placed(self, subgraph: UpdateSubgraph) -> PlacedPiece:
        """Return the only piece of an uncut parameter."""
        return self.owners[subgraph.parameter.tensor][0]

    def _closed(self, subgraphs: Sequence[UpdateSubgraph], index: GraphIndex) -> Sequence[UpdateSubgraph]:
        """Return updates with all nodes depending on them, if these nodes serve nothing else."""
        ids = {id(node) for subgraph in subgraphs for node in subgraph.nodes}
        ends = {state.updated for subgraph in subgraphs for state in subgraph.states}
        behind: dict[int, Node] = {}
        stack = [name for subgraph in subgraphs for node in subgraph.nodes for name in node.outputs if name]
        stack += [subgraph.gradient for subgraph in subgraphs]
        while stack:
            name = stack.pop()
            if name in self.training.graph.outputs and name not in ends:
                return subgraphs
            readers = [node for node in self._users.get(name, ()) if id(node) not in ids and id(node) not in behind]
            if any(id(node) in self._owned for node in readers):
                return subgraphs
            behind.update((id(node), node) for node in readers)
            stack += [output for node in readers for output in node.outputs if output]
        leader = subgraphs[0]
        nodes = sorted([*leader.nodes, *behind.values()], key=lambda node: index.position[id(node)])
        return [replace(leader, nodes=nodes), *subgraphs[1:]]

    @cached_property
    def _owned(self) -> set[int]:
        """Return the nodes of all updates, by id."""
        return {id(node) for subgraph in self.updates.subgraphs.values() for node in subgraph.nodes}

    def _seen_outside(self, subgraphs: Sequence[UpdateSubgraph]) -> bool:
        """Return whether something outside a replicated update reads its values: then every server must have it."""
        if all(subgraph.mode is not UpdateMode.REPLICATED for subgraph in subgraphs):
            return False
        graph = self.training.graph
        ids = {id(node) for subgraph in subgraphs for node in subgraph.nodes}
        results = {name for subgraph in subgraphs for node in subgraph.nodes for name in node.outputs if name}
        results |= {subgraph.gradient for subgraph in subgraphs}
        updated = {state.updated for subgraph in subgraphs for state in subgraph.states}
        read = any(id(reader) not in ids for name in results for reader in self._users.get(name, ()))
        return read or any(name in graph.outputs for name in results - updated)

    @cached_property
    def _users(self) -> Mapping[str, list[Node]]:
        """Value -> the nodes of the update reading the value."""
        users: dict[str, list[Node]] = {}
        for node in self.training.graph.nodes:
            for name in node.reads if node.phase is Phase.UPDATE else ():
                users.setdefault(name, []).append(node)
        return users

    def _nbytes(self, piece: PlacedPiece) -> int:
        gradient = self.training.graph.types[self.updates.subgraphs[piece.parameter].gradient]
        return gradient.nbytes * piece.elements // max(gradient.elements, 1)

    def _dtypes(self, subgraph: UpdateSubgraph) -> tuple[str, str, str]:
        types, name = self.training.graph.types, subgraph.parameter.tensor
        pulled = self.narrow.get(name) or self.options.travels(types[name].dtype)
        return types[subgraph.gradient].dtype, types[name].dtype, pulled
