"""The invariants of contract section 6, asserted over all ranks before anything is written."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gopt.analysis.training import StateKind
from gopt.collectives.messages import MESSAGES
from gopt.collectives.table import COLLECTIVES
from gopt.errors import InvariantError
from gopt.ir.graph import SPMD, Node
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.records.boxes import Box, all_boxes, box_elements
from gopt.records.checks import Check
from gopt.spmd.program import SpmdProgram

TRANSFERS = tuple(name for name, record in COLLECTIVES.items() if record.pairwise)


def check_ranks(
    program: SpmdProgram, ranks: Sequence[RankGraph], common: Sequence[RankState], agreed: int
) -> list[Check]:
    """Raise InvariantError if a rank graph could go wrong; returns the checks. ``agreed``: number of states and
    accumulators with checked placements."""
    shared_of: dict[int, _SharedValues] = {}
    reads_of: dict[int, int] = {}
    for rank in ranks:
        if id(rank.phase) not in shared_of:
            shared_of[id(rank.phase)] = _SharedValues.of(program, rank, common)
        if rank.kind not in reads_of:
            reads_of[rank.kind] = _closed(program, rank, shared_of[id(rank.phase)])
    reads = sum(reads_of[rank.kind] for rank in ranks)
    firsts = list({rank.rank: rank for rank in ranks}.values())
    tiled = _tiles(program, firsts)
    return [
        Check("reads", "every value a rank reads is made or given on that rank, once", reads),
        Check("calls", "all ranks of a group issue the same calls in the same order", _calls(program, ranks)),
        *(
            [Check("transfers", "each value sent is received, in the same order", _transfers(program, ranks))]
            if program.stages is not None
            else []
        ),
        Check("pieces", "the pieces of every sharded state tile its tensor: disjoint and covering", tiled),
        Check("outputs", "loss and metrics keep name and type", _outputs(program)),
        Check(
            "updates", "each element is updated by one member of the group, or by all from equal inputs", _kept(program)
        ),
        Check("scalars", "every scalar state is replicated and updated on every rank", _scalars(program, common)),
        Check("agreement", "no state follows a rank's own data, except through reductions over all of it", agreed),
    ]


@dataclass(frozen=True, slots=True)
class _SharedValues:
    """Common values of a phase: value -> index of the shared block producing it, -1 for an input.

    For each shared block also the rank-local operands, each with a reader.
    """

    made: dict[str, int]
    wanted: list[dict[str, Node]]
    reads: int
    results: tuple[str, ...]

    @classmethod
    def of(cls, program: SpmdProgram, rank: RankGraph, common: Sequence[RankState]) -> _SharedValues:
        graph = rank.phase.graph
        inputs = [*program.training.batch, *program.training.hyper, *graph.initializers]
        inputs += [state.input for state in common if state.input in graph.inputs]
        made_at = dict.fromkeys(inputs, -1)
        wanted: list[dict[str, Node]] = []
        reads = 0
        for number, block in enumerate(block for block in rank.blocks if block.shared):
            missing: dict[str, Node] = {}
            for node in block.nodes:
                missing.update((name, node) for name in node.reads if name not in made_at)
                reads += len(node.inputs)
                for name in node.outputs:
                    if name and name in made_at:
                        raise InvariantError(f"the ranks make {name!r} twice, the second time by {node.op_type}")
                made_at.update(dict.fromkeys(node.outputs, number))
            wanted.append(missing)
        results = (*program.training.shown, *(state.output for state in common))
        return cls(made_at, wanted, reads, tuple(name for name in results if name in graph.outputs))


def _closed(program: SpmdProgram, rank: RankGraph, shared: _SharedValues) -> int:
    """Count the reads of a rank; raise InvariantError for a value read too early, or missing."""
    graph, values = rank.phase.graph, set(rank.constants)
    values.update(state.input for state in rank.own if state.input in graph.inputs)
    done, reads = -1, shared.reads
    outputs: list[str] = []
    for block in rank.blocks:
        if block.shared:
            done += 1
            for name, node in shared.wanted[done].items():
                if name not in values:
                    raise _not_there(rank, node, name)
            continue
        for node in block.nodes:
            if node.domain == SPMD:
                raise InvariantError(f"rank {rank.rank} keeps the layout operator {node!r}")
            for name in node.reads:
                if name not in values and shared.made.get(name, done + 1) > done:
                    raise _not_there(rank, node, name)
            reads += len(node.inputs)
            outputs += [name for name in node.outputs if name in shared.made or name in values]
            values.update(node.outputs)
    for name in filter(None, outputs):
        if shared.made.get(name, -1) <= done:
            raise InvariantError(f"rank {rank.rank} makes {name!r} twice")
    results = (*shared.results, *(state.output for state in rank.own if state.output in graph.outputs))
    for name in results:
        if name not in values and shared.made.get(name, done + 1) > done:
            raise InvariantError(f"rank {rank.rank} does not compute {name!r}")
    return reads


def _not_there(rank: RankGraph, node: Node, name: str) -> InvariantError:
    return InvariantError(f"rank {rank.rank}: {node.op_type} {node.label!r} reads {name!r}, which it does not have")


def _calls(program: SpmdProgram, ranks: Sequence[RankGraph]) -> int:
    """Group by group and phase by phase: each member's calls, against the first member's."""
    numbers = {rank.rank for rank in ranks}
    groups: dict[tuple[str, str, int], dict[int, list[Node]]] = {}
    calls_of: dict[int, dict[str, list[Node]]] = {}
    count = 0
    for rank in ranks:
        if rank.kind not in calls_of:
            by_group = calls_of[rank.kind] = {}
            for node in (call for call in rank.calls if call.op_type not in (*MESSAGES, *TRANSFERS)):
                by_group.setdefault(str(node.attributes["group"]), []).append(node)
        for group, nodes in calls_of[rank.kind].items():
            groups.setdefault((rank.phase.name, group, program.mesh.first(group, rank.rank)), {})[rank.rank] = nodes
            count += len(nodes)
    for (_, group, start), calls in groups.items():
        lowest = min(calls)
        for rank_number in numbers.intersection(program.mesh.members(group, start)):
            _same_calls(group, (lowest, calls[lowest]), (rank_number, calls.get(rank_number, [])))
    return count


def _transfers(program: SpmdProgram, ranks: Sequence[RankGraph]) -> int:
    """Check the values between each two ranks, by tag: each sent value is received, by an action or by a later one."""
    numbers = {rank.rank for rank in ranks}
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in ranks:
        for node in rank.calls:
            if node.op_type in TRANSFERS:
                peer = node.attributes["peer"]
                ends = (rank.rank, peer) if node.op_type == "Send" else (peer, rank.rank)
                (sent if node.op_type == "Send" else received)[ends].append(node.attributes["tag"])
    for source, target in {**sent, **received} if len(numbers) == program.mesh.ranks else ():
        tags, arrivals = sorted(sent[source, target]), sorted(received[source, target])
        if tags != arrivals:
            raise InvariantError(f"rank {source} sends rank {target} values of tags {tags}, and it receives {arrivals}")
    return sum(map(len, sent.values()))


def _same_calls(group: str, mine: tuple[int, list[Node]], theirs: tuple[int, list[Node]]) -> None:
    ranks = f"ranks {mine[0]} and {theirs[0]}"
    if len(mine[1]) != len(theirs[1]):
        raise InvariantError(f"{ranks} make {len(mine[1])} and {len(theirs[1])} calls over {group}")
    for one, peer_call in zip(mine[1], theirs[1]):
        if one is not peer_call and (one.op_type, one.attributes) != (peer_call.op_type, peer_call.attributes):
            raise InvariantError(f"{ranks} differ in a call: {one!r} and {peer_call!r}")


def _tiles(program: SpmdProgram, ranks: Sequence[RankGraph]) -> int:
    """Over all ranks sharing a state out; skipped when only some ranks are made."""
    types = program.training.graph.types
    boxed: dict[tuple[str, Box | None], Counter[tuple[int, int]]] = {}
    alike = Counter(rank.kind for rank in ranks)
    if alike.total() != program.mesh.ranks:
        return 0
    for rank in {rank.kind: rank for rank in ranks}.values():
        for state in rank.states:
            for piece in () if state.copy else state.pieces:
                parts = boxed.setdefault((piece.tensor, piece.box), Counter())
                parts[piece.start, piece.stop] += alike[rank.kind]
    _boxes(program, boxed)
    ranges = {tensor: parts for (tensor, box), parts in boxed.items() if box is None}
    for sharded in program.states:
        copies = program.mesh.ranks // math.prod(program.mesh.size(axis) for axis, _ in sharded.sharding.by_axis)
        for part in sharded.slices if sharded.sharded and not sharded.copy else ():
            if part.tensor in program.parts:
                continue
            position = 0
            for start, stop in sorted(ranges.get(part.tensor, ())):
                if start != position:
                    raise InvariantError(f"pieces of {part.tensor!r} omit or repeat elements at {min(start, position)}")
                position = stop
            if position != types[part.tensor].elements or ranges[part.tensor].total() % copies:
                raise InvariantError(f"pieces of {part.tensor!r} end at {position} of {types[part.tensor].elements}")
    return len({tensor for tensor, _ in boxed})


def _boxes(program: SpmdProgram, boxed: Mapping[tuple[str, Box | None], Iterable[tuple[int, int]]]) -> None:
    """Boxes follow the sharding, and pieces tile each box; an empty box may have no piece."""
    types = program.source.graph.types
    boxes_of: defaultdict[str, set[Box | None]] = defaultdict(set)
    for tensor, box in boxed:
        boxes_of[tensor].add(box)
    for tensor, sharding in program.parts.items():
        wanted = set(all_boxes(sharding, types[tensor].dims))
        result = boxes_of[tensor] | {box for box in wanted if box is not None and not box_elements(box)}
        if result != wanted or sum(box_elements(box) for box in wanted if box) != types[tensor].elements:
            raise InvariantError(f"the ranks' parts of {tensor!r} do not follow its sharding, {sharding}")
        for box in wanted:
            position = 0
            for start, stop in sorted(boxed.get((tensor, box), ())):
                if start != position:
                    raise InvariantError(
                        f"pieces of {tensor!r} omit or repeat elements at {min(start, position)} of {box}"
                    )
                position = stop
            if box is not None and position != box_elements(box):
                raise InvariantError(f"pieces of {tensor!r} end at {position} of {box_elements(box)} in {box}")


def _outputs(program: SpmdProgram) -> int:
    source = program.source.graph
    names = program.training.shown
    for variant in program.variants:
        for name in names:
            if variant.graph.types.get(name) != source.types.get(name):
                raise InvariantError(f"output {name!r} changed its type")
    return len(names)


def _kept(program: SpmdProgram) -> int:
    """Every state of the source is held once."""
    for variant in program.variants:
        elements_of: dict[str, int] = {}
        for sharded in variant.states:
            for part in sharded.slices if not sharded.copy else ():
                elements_of[part.tensor] = elements_of.get(part.tensor, 0) + part.elements
        for state in program.source.states:
            name, elements = state.tensor, variant.training.graph.types[state.tensor].elements
            if elements_of.get(name) != elements:
                raise InvariantError(f"state {name!r} is held {elements_of.get(name, 0)} of {elements} elements")
    return len(program.source.states)


def _scalars(program: SpmdProgram, common: Sequence[RankState]) -> int:
    everywhere = {state.input for state in common}
    names = [state.tensor for state in program.training.states if state.kind is StateKind.SCALAR]
    for name in names:
        if name not in everywhere:
            raise InvariantError(f"scalar state {name!r} is not on every rank")
    return len(names)
