"""Plans the units that servers update and the messages that carry them. The graph is not changed.

A unit is updated as one by one server: a run of pieces with alike updates, or whole tensors whose updates cannot be
cut. A bucket is the units of one server whose gradients travel in one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from gopt.analysis.graph_walks import GraphIndex
from gopt.analysis.training import Phase, TrainingGraph
from gopt.analysis.update_subgraphs import find_updates
from gopt.analysis.updates import Mode, Updates, UpdateSubgraph
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.parameter_server.components import components
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.placement import PieceSize, place
from gopt.parameter_server.slicing import pieces, static_shape
from gopt.parameter_server.table_choice import TableChoice, choose_tables
from gopt.sanitize import show


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
class Unit:
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
    dtypes: tuple[str, str]
    """Of gradients and parameters."""

    @property
    def elements(self) -> int:
        return sum(piece.elements for piece in self.pieces)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Return the gradients of a whole unit, each once."""
        return tuple(dict.fromkeys(subgraph.gradient for subgraph in self.subgraphs))


@dataclass(frozen=True, slots=True)
class Bucket:
    """A message of gradients to a server, or to every server."""

    number: int
    server: int | None
    units: tuple[Unit, ...]

    @property
    def ready(self) -> int:
        return max(unit.ready for unit in self.units)


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """All buckets, in the order in which their gradients are complete; ``owners``: parameter -> its pieces in order.

    ``tables``: parameters that are in no bucket, because trainers pull and push their rows.
    """

    updates: Updates
    buckets: tuple[Bucket, ...]
    owners: Mapping[str, tuple[PlacedPiece, ...]]
    tables: TableChoice = field(default_factory=TableChoice)

    @property
    def units(self) -> list[Unit]:
        return [unit for bucket in self.buckets for unit in bucket.units]

    def __repr__(self) -> str:
        return (
            f"<ServerPlan of {len(self.owners)} parameters in {len(self.units)} units and {len(self.buckets)} buckets>"
        )


def make_plan(training: TrainingGraph, options: SplitOptions) -> ServerPlan:
    """Place every parameter that has a gradient.

    Raises UnsupportedError for a parameter of open shape, and in asynchronous modes for updates that belong together.
    """
    apart = not options.mode.rounds
    updates = find_updates(training, whole_accumulators=False)
    if not updates.subgraphs:
        raise UnsupportedError(
            "no parameter has a gradient: there is nothing to update on servers",
            "gopt inspect shows the roles; --params INPUT=GRADIENT names a gradient",
        )
    if apart:
        _refuse_common(updates)
    types = training.graph.types
    tables = choose_tables(training, updates, options)
    cut = {
        name: pieces(static_shape(name, types[name].shape), options.slicing, options.servers, options.minimum)
        for name, subgraph in updates.subgraphs.items() if _may_cut(subgraph, apart) and name not in tables.parameters
    }  # fmt: skip
    # What stays in one piece completes a reduction of its own, such as a trust ratio: no call among servers is needed.
    # A tensor without elements would vanish from a run.
    kept = [name for name, each in updates.subgraphs.items() if len(cut.get(name, ())) < 2 and _private(each, updates)]
    kept += [name for name in updates.subgraphs if not types[name].elements]
    whole = frozenset(name for name in kept if updates.subgraphs[name].mode is Mode.SPLIT) - tables.parameters
    if whole:
        updates = find_updates(training, whole_accumulators=False, uncut=whole)
    tables = replace(
        tables, served=tuple(replace(each, subgraph=updates.subgraphs[each.table.parameter]) for each in tables.served)
    )
    left = {name: each for name, each in updates.subgraphs.items() if name not in tables.parameters}
    dense = replace(updates, subgraphs=left)
    owners = _place(training, dense, {name: ranges for name, ranges in cut.items() if name not in whole}, options)
    units = _Units(training, dense, owners, options)
    ordered = sorted(units.all(), key=lambda unit: (unit.ready, -1 if unit.server is None else unit.server))
    ordered = [replace(unit, number=number) for number, unit in enumerate(ordered)]
    return ServerPlan(updates, tuple(make_buckets(ordered, options)), owners, tables)


def _may_cut(subgraph: UpdateSubgraph, apart: bool) -> bool:
    """Return whether a tensor may be cut among servers: it is updated alone, and shares no reduction with others."""
    return subgraph.mode is Mode.SPLIT and not (apart and subgraph.reductions)


def _private(subgraph: UpdateSubgraph, updates: Updates) -> bool:
    """Return whether a tensor has reductions, and all of them are of it alone."""
    roots = [updates.scalar_reductions.get(updates.reduction_of.get(n.outputs[0], "")) for n in subgraph.reductions]
    return bool(roots) and all(root is not None and len(root.leaves) == 1 and not root.epilogue for root in roots)


def _refuse_common(updates: Updates) -> None:
    """Refuse reductions over several parameters where each parameter is updated when its gradient arrives."""
    for reduction in updates.scalar_reductions.values():
        if len(reduction.leaves) > 1 or reduction.epilogue:
            raise UnsupportedError(
                f"{show(reduction.root)} is computed from the gradients of several parameters: without rounds they are "
                "never there together",
                "take --mode sync, or clip each gradient by itself",
            )


def _place(
    training: TrainingGraph, updates: Updates, cut: Mapping[str, Sequence[tuple[int, int]]], options: SplitOptions
) -> dict[str, tuple[PlacedPiece, ...]]:
    """Return the pieces of every parameter with their servers. Tensors that are updated together are placed as one."""
    types = training.graph.types
    together = components(updates)
    sizes, of = [], []
    for name in updates.subgraphs:
        members = together.get(name, (name,))
        if members[0] != name:
            continue
        ranges = cut.get(name, ((0, types[name].elements),))
        held = sum(types[state.tensor].nbytes for each in members for state in updates.subgraphs[each].states)
        for index, (start, stop) in enumerate(ranges):
            part = held * (stop - start) // max(types[name].elements, 1) if len(ranges) > 1 else held
            sizes.append(PieceSize(name, index, part))
            of.append((name, index, start, stop))
    servers = place(sizes, options.servers, options.placement, options.given)
    found: dict[str, list[PlacedPiece]] = {}
    for (name, index, start, stop), server in zip(of, servers):
        whole = name not in cut or len(cut[name]) == 1
        found.setdefault(name, []).append(PlacedPiece(name, index, start, stop, server, whole))
    for name, (first, *_) in together.items():
        if name != first:
            found[name] = [PlacedPiece(name, 0, 0, types[name].elements, found[first][0].server, True)]
    return {name: tuple(found[name]) for name in updates.subgraphs}


@dataclass
class _Units:
    """Makes units of placed pieces."""

    training: TrainingGraph
    updates: Updates
    owners: Mapping[str, tuple[PlacedPiece, ...]]
    options: SplitOptions

    def all(self) -> Iterator[Unit]:
        """Yield every unit, in no particular order; their numbers are not set."""
        index = GraphIndex(self.training.graph)
        runs: dict[tuple[object, ...], list[tuple[int, PlacedPiece]]] = {}
        together = components(self.updates)
        for name, subgraph in self.updates.subgraphs.items():
            ready = index.defined_at(subgraph.gradient)
            if subgraph.mode is Mode.SPLIT:
                for piece in self.owners[name]:
                    key = (piece.server, subgraph.equivalence_class, *self._dtypes(subgraph))
                    runs.setdefault(key, []).append((ready, piece))
            elif together.get(name, (name,))[0] == name:
                yield self._whole([self.updates.subgraphs[each] for each in together.get(name, (name,))], index)
        for run in runs.values():
            run.sort(key=lambda item: (item[0], item[1].index))
            yield from (self._run(chunk) for chunk in self._chunks(run))

    def _chunks(self, run: Sequence[tuple[int, PlacedPiece]]) -> Iterator[list[tuple[int, PlacedPiece]]]:
        """Yield runs of pieces that may be one unit: single pieces where each is updated on arrival, else up to the
        cap."""
        width = self._nbytes(run[0][1]) / max(run[0][1].elements, 1)
        chunk: list[tuple[int, PlacedPiece]] = []
        held = 0.0
        for item in run:
            nbytes = item[1].elements * width
            if chunk and (not self.options.mode.rounds or held + nbytes > self.options.cap):
                yield chunk
                chunk, held = [], 0.0
            chunk.append(item)
            held += nbytes
        yield chunk

    def _run(self, chunk: Sequence[tuple[int, PlacedPiece]]) -> Unit:
        subgraphs = tuple(self.updates.subgraphs[piece.parameter] for _, piece in chunk)
        placed = tuple(piece for _, piece in chunk)
        nbytes = sum(map(self._nbytes, placed))
        ready = max(at for at, _ in chunk)
        return Unit(0, placed[0].server, True, subgraphs, placed, ready, nbytes, self._dtypes(subgraphs[0]))

    def _whole(self, subgraphs: Sequence[UpdateSubgraph], index: GraphIndex) -> Unit:
        types = self.training.graph.types
        if not self.options.mode.rounds:  # each is updated by itself, so it takes what it alone reads along
            subgraphs = self._closed(subgraphs, index)
        placed = tuple(self.owners[each.parameter.tensor][0] for each in subgraphs)
        server = None if self._seen_outside(subgraphs) else placed[0].server
        gradients = dict.fromkeys(each.gradient for each in subgraphs)
        ready = max(index.defined_at(name) for name in gradients)
        nbytes = sum(types[name].nbytes for name in gradients)
        return Unit(0, server, False, tuple(subgraphs), placed, ready, nbytes, self._dtypes(subgraphs[0]))

    def _closed(self, subgraphs: Sequence[UpdateSubgraph], index: GraphIndex) -> Sequence[UpdateSubgraph]:
        """Return updates with all nodes that depend on them, if these nodes serve nothing else."""
        own = {id(node) for each in subgraphs for node in each.nodes}
        ends = {state.updated for each in subgraphs for state in each.states}
        behind: dict[int, Node] = {}
        stack = [name for each in subgraphs for node in each.nodes for name in node.outputs if name]
        stack += [each.gradient for each in subgraphs]
        while stack:
            name = stack.pop()
            if name in self.training.graph.outputs and name not in ends:
                return subgraphs
            found = [node for node in self._users.get(name, ()) if id(node) not in own and id(node) not in behind]
            if any(id(node) in self._owned for node in found):
                return subgraphs
            behind.update((id(node), node) for node in found)
            stack += [made for node in found for made in node.outputs if made]
        first = subgraphs[0]
        nodes = sorted([*first.nodes, *behind.values()], key=lambda node: index.position[id(node)])
        return [replace(first, nodes=nodes), *subgraphs[1:]]

    @cached_property
    def _owned(self) -> set[int]:
        """Return the nodes of all updates, by id."""
        return {id(node) for each in self.updates.subgraphs.values() for node in each.nodes}

    def _seen_outside(self, subgraphs: Sequence[UpdateSubgraph]) -> bool:
        """Return whether something outside a replicated update reads its values: then every server must have it."""
        if all(each.mode is not Mode.REPLICATED for each in subgraphs):
            return False
        graph = self.training.graph
        own = {id(node) for each in subgraphs for node in each.nodes}
        made = {name for each in subgraphs for node in each.nodes for name in node.outputs if name}
        made |= {each.gradient for each in subgraphs}
        updated = {state.updated for each in subgraphs for state in each.states}
        read = any(id(reader) not in own for name in made for reader in self._users.get(name, ()))
        return read or any(name in graph.outputs for name in made - updated)

    @cached_property
    def _users(self) -> Mapping[str, list[Node]]:
        """Value -> the nodes of the update that read it."""
        found: dict[str, list[Node]] = {}
        for node in self.training.graph.nodes:
            for name in node.reads if node.phase is Phase.UPDATE else ():
                found.setdefault(name, []).append(node)
        return found

    def _nbytes(self, piece: PlacedPiece) -> int:
        gradient = self.training.graph.types[self.updates.subgraphs[piece.parameter].gradient]
        return gradient.nbytes * piece.elements // max(gradient.elements, 1)

    def _dtypes(self, subgraph: UpdateSubgraph) -> tuple[str, str]:
        types = self.training.graph.types
        return types[subgraph.gradient].dtype, types[subgraph.parameter.tensor].dtype


def make_buckets(units: Sequence[Unit], options: SplitOptions) -> list[Bucket]:
    """Group neighbouring units of one server and of the same types, up to the cap."""

    def kind(unit: Unit) -> tuple[int, tuple[str, str]]:
        return -1 if unit.server is None else unit.server, unit.dtypes

    found: list[tuple[Unit, ...]] = []
    for _, group in groupby(sorted(units, key=kind), key=kind):
        held: list[Unit] = []
        nbytes = 0
        for unit in group:
            if held and nbytes + unit.nbytes > options.cap:
                found.append(tuple(held))
                held, nbytes = [], 0
            held.append(unit)
            nbytes += unit.nbytes
        found.append(tuple(held))
    found.sort(key=lambda units: (max(unit.ready for unit in units), units[0].number))
    return [Bucket(number, units[0].server, units) for number, units in enumerate(found)]
