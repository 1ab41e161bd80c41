"""From the rank-independent program to rank graphs: keep the rank's nodes, resolve its elements. No pass.

Common nodes are made once for each phase. A rank costs its own nodes: placed nodes, layout operators, constants. Ranks
differing in constants alone share all nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from onnx import FunctionProto

from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, SPMD, Node, clone
from gopt.ir.opaque.function_export import with_functions
from gopt.ir.opaque.refold import REFOLD, RefoldedCall
from gopt.ir.opset import opset_of
from gopt.ir.types import TensorType
from gopt.lower.layout_operators import LOWERED, LoweringContext
from gopt.lower.phases import LoweredPhase
from gopt.lower.rank_graph import RankAccumulator, RankBlock, RankGraph, RankSaved, RankState, ShardRange
from gopt.records.mesh import PIPELINE
from gopt.records.placements import OnMember, Sharding
from gopt.spmd.program import Accumulator, ShardedState, SpmdProgram

T = TypeVar("T")

_PAIRWISE = frozenset(name for name, record in COLLECTIVES.items() if record.pairwise)
LONGEST_BLOCK = 8192
"""Nodes of a shared block at most: the bytes of one are made in one piece."""


NOTHING = RankBlock.of(
    (Node("Constant", [], ["gopt.stages.nothing"], attributes={"value_int": 0}, made_by="stage-transfers"),),
    shared=False,
)
"""The nodes of a file with nothing to compute."""


def common_states(program: SpmdProgram) -> list[RankState]:
    """The states every rank holds whole, in the source's order."""
    return [_whole(program, state) for state in program.states if not _apart(program, state)]


def _apart(program: SpmdProgram, state: ShardedState) -> bool:
    """Return whether ranks hold different parts of a state."""
    return state.sharded or any(part.tensor in program.parts for part in state.slices)


class Specialiser:
    """Makes the graphs of one phase, rank by rank."""

    def __init__(self, program: SpmdProgram, phase: LoweredPhase) -> None:
        self.program, self.phase = program, phase
        self._whole = _Share(
            list(_items(phase.graph.nodes)), list(_local_values(program, phase)),
            [state for state in program.states if _apart(program, state)], program.accumulators,
        )  # fmt: skip
        self._shares: dict[int, _Share] = {}
        """Member of the pipeline -> what is not of other members alone."""
        self._variants: dict[Hashable, tuple[Node, ...]] = {}
        """Nodes that a source node becomes, shared by equal ranks."""
        self._blocks: dict[tuple[int, ...], RankBlock] = {}
        self._version = opset_of(program.graph.header)
        self._holdings: _MadeOnce[_Holding] = _MadeOnce(lambda read, _: self._hold(read))
        self._contents: _MadeOnce[RankGraph] = _MadeOnce(self._content)
        self._kinds: dict[tuple[int, int], RankGraph] = {}
        self._unlike: dict[Hashable, RankGraph] = {}
        """Contents, but for the numbers of peers."""

    def rank(self, rank: int) -> RankGraph:
        """The graph of one rank of the mesh; ranks that differ along other axes alone share its contents."""
        kind = self.kind(rank)
        blocks = [_of_rank(block, rank - kind.rank) for block in kind.blocks] if rank != kind.rank else kind.blocks
        if all(map(operator.is_, blocks, kind.blocks)):
            return replace(kind, rank=rank)
        return replace(kind, rank=rank, blocks=blocks, like=kind)

    def kind(self, rank: int) -> RankGraph:
        """The graph of a rank, with the peers of the rank in the graph."""
        coordinates = self.program.mesh.coordinates(rank)
        holding = self._holdings.of(coordinates, rank)
        content = self._contents.of(coordinates, rank, holding.present)
        key = id(holding), id(content)
        if key not in self._kinds:
            self._kinds[key] = replace(
                content, blocks=list(content.blocks), states=holding.states, accumulators=holding.accumulators,
                saved=holding.saved, types=content.types | holding.types,
            )  # fmt: skip
        return self._kinds[key]

    def _share(self, coordinates: Mapping[str, int]) -> _Share:
        if self.program.stages is None:
            return self._whole
        member = coordinates[PIPELINE]
        if member not in self._shares:
            self._shares[member] = self._whole.on_stage_of(member)
        return self._shares[member]

    def _content(self, read: _ReadCoordinates, present: frozenset[str]) -> RankGraph:
        """The nodes of a rank; ``present``: the inputs from file to file, of the rank."""
        at = _Rank(read, RankGraph(read.rank, self.phase, [], []), present=set(present))
        share = self._share(read)
        nodes: list[Node] = []
        for item in share.items:
            if isinstance(item, RankBlock):
                self._close(at, nodes)
                at.out.blocks.append(item)
            elif isinstance(item, _PlacedRun):
                if at.runs(item.sharding):
                    nodes += item.nodes if at.alias.keys().isdisjoint(item.reads) else self._each(at, item.nodes)
                    at.present |= item.results
            else:
                result = self._own(at, item)
                if any(map(_has_peer, result)):  # in a block alone: all other blocks are the same on more ranks
                    self._close(at, nodes)
                    self._close(at, [*result])
                else:
                    nodes += result
        self._close(at, nodes)
        if not at.out.blocks:  # such as the input half of a backward of the first stage
            at.out.blocks.append(NOTHING)
        for name, type, sharding in share.locals:
            owners = [(axis, part) for axis, part in sharding.by_axis if isinstance(part, OnMember)]
            if not all(part.covers(at.coordinates[axis]) for axis, part in owners):
                continue
            at.out.types.setdefault(name, TensorType(type.dtype, sharding.local_shape(type.dims, at.coordinates)))
        if at.bodies:
            self._add_functions(at)
            return at.out
        blocks = tuple(_without_numbers(block, read.rank) for block in at.out.blocks)
        arrays = at.out.constants.items()
        constants = frozenset((name, array.dtype.str, array.shape, array.tobytes()) for name, array in arrays)
        return self._unlike.setdefault((blocks, constants, frozenset(at.out.types.items())), at.out)

    def _hold(self, coordinates: Mapping[str, int]) -> _Holding:
        """The states, the accumulators and the saved values of a rank."""
        share, present = self._share(coordinates), set[str]()
        result = _Holding()
        for state in share.states:
            if state.sharding.covers(coordinates):
                flat = state.sharding.flat is not None
                part = _run(self.program, coordinates, state) if flat else _whole(self.program, state, coordinates)
                result.states.append(part)
                present.add(state.input)
        for summed in share.sums:
            if summed.present(coordinates):
                type = summed.local_type(coordinates)
                result.accumulators.append(RankAccumulator(summed.input, summed.output, type))
                result.types[summed.input] = type
        for name, members in self.phase.saved.items():
            if coordinates[PIPELINE] in members:
                sharding, type = self.program.sharded.get(name), self.phase.graph.types[name]
                if sharding is not None:
                    type = TensorType(type.dtype, sharding.local_shape(type.dims, coordinates))
                result.saved.append(RankSaved(name, type))
                if name in self.phase.graph.inputs:
                    present.add(name)
        result.present = frozenset(present)
        return result

    def _each(self, at: _Rank, nodes: Iterable[Node]) -> Iterator[Node]:
        return (own for node in nodes for own in self._own(at, node))

    def _own(self, at: _Rank, node: Node) -> Sequence[Node]:
        """Return the rank's nodes for a node differing between ranks."""
        if isinstance(node.origin, RefoldedCall) and node.op_type == REFOLD:
            return self._refold(at, node, node.origin)
        if not at.runs(node.sharding):
            return ()
        if _has_root(node):
            at.present.update(node.outputs)
            return self._broadcast(at, node)
        if node.domain == SPMD:
            if not at.alias.keys().isdisjoint(node.inputs):
                node = _with(node, [at.alias.get(name, name) for name in node.inputs])
            program = self.program
            types, rank = program.graph.types, at.coordinates.rank
            context = LoweringContext(at.coordinates, at.present, types, program.mesh, program.sharded, rank)
            lowered = LOWERED[node.op_type](node, context)
            at.out.constants.update(lowered.constants)
            at.out.types.update(lowered.types)
            if lowered.alias:
                at.alias[node.outputs[0]] = lowered.alias
            nodes = self._variant((node, lowered.variant), lowered.nodes)
            if lowered.absent:
                return nodes
        else:
            if at.alias.keys().isdisjoint(node.inputs):
                nodes = (node,)
            else:
                inputs = [at.alias.get(name, name) for name in node.inputs]
                nodes = self._variant((node, *inputs), lambda: [_with(node, inputs)])
        at.present.update(node.outputs)
        return nodes

    def _broadcast(self, at: _Rank, node: Node) -> Sequence[Node]:
        """Only the root gives a Broadcast its inputs."""
        member = self.program.mesh.index_at(str(node.attributes["group"]), at.coordinates)
        if not node.inputs or member == node.attributes["root"]:
            return (node,)
        return self._variant((node, "no root"), lambda: [_with(node, [])])

    def _refold(self, at: _Rank, node: Node, refolded: RefoldedCall) -> Sequence[Node]:
        """An opaque operator over the rank's parts of weights."""
        nodes, function, results = refolded.on(at.coordinates, self.program.graph.types, self._version, node.made_by)
        for item in nodes:
            item.inputs = [at.alias.get(name, name) for name in item.inputs]
        if function is not None:
            at.bodies.update((node, function) for node in nodes if node.domain)
        at.present.update(results)
        return nodes

    def _variant(self, key: Hashable, build: Callable[[], Sequence[Node]]) -> tuple[Node, ...]:
        nodes = self._variants.get(key)
        if nodes is None:
            nodes = self._variants[key] = tuple(build())
        return nodes

    def _close(self, at: _Rank, nodes: list[Node]) -> None:
        """Close the block of nodes between two shared blocks; equal ranks share it."""
        if nodes:
            key = tuple(map(id, nodes))
            if key not in self._blocks:
                self._blocks[key] = RankBlock.of(tuple(nodes), shared=False)
            at.out.blocks.append(self._blocks[key])
            nodes.clear()

    def _add_functions(self, at: _Rank) -> None:
        """Give refolded operators bodies; a second body of an operator needs a node naming the overload."""
        refolded = [node for block in at.out.blocks if not block.shared for node in block.nodes if node in at.bodies]
        called, at.out.functions = with_functions(
            ((node, at.bodies[node]) for node in refolded), self.program.graph.header
        )
        now = dict(zip(refolded, called))
        at.out.blocks = [
            block if block.shared or now.keys().isdisjoint(block.nodes)
            else RankBlock.of(tuple(now.get(node, node) for node in block.nodes), shared=False)
            for block in at.out.blocks
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Share:
    """The nodes, values, states and sums that some ranks have: of all stages, or of the stages of one member."""

    items: Sequence[RankBlock | _PlacedRun | Node]
    locals: Sequence[tuple[str, TensorType, Sharding]]
    states: Sequence[ShardedState]
    sums: Sequence[Accumulator]

    def on_stage_of(self, member: int) -> _Share:
        """The share without the stages of other members: a rank of many stages then costs its own stages alone."""

        def near(sharding: Sharding) -> bool:
            placement = sharding.on(PIPELINE)
            return not isinstance(placement, OnMember) or placement.member == member

        return _Share(
            [item for item in self.items if isinstance(item, RankBlock) or near(item.sharding)],
            [item for item in self.locals if near(item[2])],
            [item for item in self.states if near(item.sharding)],
            [item for item in self.sums if near(item.sharding)],
        )


@dataclass(slots=True)
class _Holding:
    """States, sums and saved values of a rank. ``present``: the inputs among them."""

    states: list[RankState] = field(default_factory=list)
    accumulators: list[RankAccumulator] = field(default_factory=list)
    saved: list[RankSaved] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    present: frozenset[str] = frozenset()


class _MadeOnce(Generic[T]):
    """Results of ``make`` for coordinates, once for all ranks with the same coordinates along the axes read."""

    def __init__(self, make: Callable[[_ReadCoordinates, Any], T]) -> None:
        self.make = make
        self._results: dict[tuple[str, ...], dict[Hashable, T]] = {}

    def of(self, coordinates: Mapping[str, int], rank: int, further: Hashable = None) -> T:
        """The result for a rank; ``further``: the second operand."""
        for axes, results in self._results.items():
            result = results.get((further, *(coordinates[axis] for axis in axes)))
            if result is not None:
                return result
        read = _ReadCoordinates(coordinates, rank)
        result = self.make(read, further)
        self._results.setdefault(tuple(read.axes), {})[further, *read.axes.values()] = result
        return result


class _ReadCoordinates(Mapping[str, int]):
    """The coordinates of a rank. ``axes``: what was read."""

    def __init__(self, coordinates: Mapping[str, int], rank: int) -> None:
        self._of, self.rank = coordinates, rank
        self.axes: dict[str, int] = {}

    def __getitem__(self, axis: str) -> int:
        self.axes[axis] = self._of[axis]
        return self._of[axis]

    def __iter__(self) -> Iterator[str]:
        self.axes.update(self._of)
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


@dataclass(slots=True)
class _Rank:
    """A rank under construction: its nodes so far, and the renamed values."""

    coordinates: _ReadCoordinates
    out: RankGraph
    alias: dict[str, str] = field(default_factory=dict)
    present: set[str] = field(default_factory=set)
    """Values that some ranks have, and this one has."""
    bodies: dict[Node, FunctionProto] = field(default_factory=dict)
    _covered: dict[int, bool] = field(default_factory=dict)
    """By the id of a sharding, which the nodes of a run share: whether the rank has some of it."""

    def runs(self, sharding: Sharding) -> bool:
        """Return whether the rank runs nodes with this sharding."""
        result = self._covered.get(id(sharding))
        if result is None:
            result = self._covered[id(sharding)] = sharding.covers(self.coordinates)
        return result


@dataclass(frozen=True, slots=True)
class _PlacedRun:
    """Consecutive nodes of one sharding, with their operands and results."""

    nodes: tuple[Node, ...]
    sharding: Sharding
    reads: frozenset[str]
    results: frozenset[str]


def _has_peer(node: Node) -> bool:
    return node.domain == COMM and node.op_type in _PAIRWISE  # messages to servers are no collectives


def _of_rank(block: RankBlock, distance: int) -> RankBlock:
    """A block of a rank so far behind: peers are behind as well."""
    if not any(map(_has_peer, block.calls)):
        return block
    nodes = []
    for node in block.nodes:
        if _has_peer(node):
            attributes, node = node.attributes, clone(node)
            node._attributes = {**attributes, "peer": attributes["peer"] + distance}
        nodes.append(node)
    return RankBlock.of(tuple(nodes), shared=block.shared)


def _without_numbers(block: RankBlock, rank: int) -> Hashable:
    """A block, which ranks share, or the calls with peers counted from a rank."""
    if not any(map(_has_peer, block.calls)):
        return block
    facts: list[Hashable] = []
    for node in block.nodes:
        peer = node.attributes["peer"] - rank if _has_peer(node) else None
        fact = (node.op_type, *node.inputs, "to", *node.outputs, str({**node.attributes, "peer": peer}))
        facts.append(node if peer is None else fact)
    return tuple(facts)


def _has_root(node: Node) -> bool:
    """Return whether members other than the root give a node no inputs."""
    return node.domain == COMM and node.op_type == "Broadcast"


def _items(nodes: Sequence[Node]) -> Iterator[RankBlock | _PlacedRun | Node]:
    """Runs of nodes alike on all ranks as blocks, runs of one sharding, and layout operators one by one."""
    placed: list[Node] = []
    for item in _blocks(nodes):
        plain = isinstance(item, Node) and bool(item.sharding.by_axis) and item.domain != SPMD and not _has_root(item)
        if placed and (not plain or placed[0].sharding is not item.sharding):  # type: ignore[union-attr]
            yield _placed(placed)
            placed = []
        if plain:
            placed.append(item)  # type: ignore[arg-type]
        else:
            yield item
    if placed:
        yield _placed(placed)


def _placed(nodes: Sequence[Node]) -> _PlacedRun:
    reads = frozenset(name for node in nodes for name in node.reads)
    results = frozenset(name for node in nodes for name in node.outputs)
    return _PlacedRun(tuple(nodes), nodes[0].sharding, reads, results)


def _blocks(nodes: Sequence[Node]) -> Iterator[RankBlock | Node]:
    """Runs of nodes alike on all ranks as blocks, and all other nodes one by one."""
    run: list[Node] = []
    for node in nodes:
        alike = not node.sharding.by_axis and node.domain != SPMD
        alike = alike and not _has_root(node)
        if alike:
            run.append(node)
        if run and (not alike or len(run) == LONGEST_BLOCK):
            yield RankBlock.of(tuple(run), shared=True)
            run = []
        if not alike:
            yield node
    if run:
        yield RankBlock.of(tuple(run), shared=True)


def _local_values(program: SpmdProgram, phase: LoweredPhase) -> Iterator[tuple[str, TensorType, Sharding]]:
    """Values with a different part on each rank, of nodes that do not run on parts of buckets."""
    for node in phase.graph.nodes:
        if node.sharding.flat is None and node.domain != SPMD:
            for name in node.outputs:
                if name in program.sharded:
                    yield name, phase.graph.types[name], program.sharded[name]


def _whole(program: SpmdProgram, state: ShardedState, coordinates: Mapping[str, int] | None = None) -> RankState:
    part = state.slices[0]
    type = TensorType(state.dtype, program.training.graph.types[part.tensor].shape)
    box = program.box(part.tensor, coordinates) if coordinates is not None else None
    piece = ShardRange(part.tensor, 0, part.elements, box)
    return RankState(state.input, state.output, type, (piece,), state.local, state.copy)


def _run(program: SpmdProgram, coordinates: Mapping[str, int], state: ShardedState) -> RankState:
    start, stop = state.sharding.part(coordinates)
    pieces = tuple(
        ShardRange(
            part.tensor,
            part.start + max(start - part.offset, 0),
            part.start + min(stop - part.offset, part.elements),
            program.box(part.tensor, coordinates),
        )
        for part in state.slices
        if max(start, part.offset) < min(stop, part.offset + part.elements)
    )
    return RankState(state.input, state.output, TensorType(state.dtype, (stop - start,)), pieces)


def _with(node: Node, inputs: list[str]) -> Node:
    renamed = Node(
        node.op_type, inputs, node.outputs, domain=node.domain, name=node.name, attributes=node.attributes,
        made_by=node.made_by, sharding=node.sharding,
    )  # fmt: skip
    renamed.phase = node.phase
    return renamed
