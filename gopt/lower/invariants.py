"""The invariants of contract section 6, asserted over all ranks before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gopt.analysis.training import StateKind
from gopt.errors import InvariantError
from gopt.ir.graph import COMM, SPMD, Node
from gopt.lower.agreement import check_placements
from gopt.lower.specialise import RankGraph, RankState
from gopt.program import SpmdProgram


@dataclass(frozen=True, slots=True)
class Check:
    """An invariant that held, and on how many things."""

    name: str
    what: str
    count: int

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "what": self.what, "count": self.count}


def check_ranks(program: SpmdProgram, ranks: Sequence[RankGraph], common: Sequence[RankState]) -> list[Check]:
    """Raise InvariantError when a rank graph could go wrong; returns what was asserted."""
    reads = sum(_closed(program, rank, common) for rank in ranks)
    firsts = list({rank.rank: rank for rank in ranks}.values())
    return [
        Check("reads", "every value a rank reads is made or given on that rank", reads),
        Check("calls", "all ranks of a group issue the same calls in the same order", _calls(program, ranks)),
        Check(
            "pieces",
            "the pieces of every sharded state tile its tensor: disjoint and covering",
            _tiles(program, firsts),
        ),
        Check("outputs", "loss and metrics keep name and type", _outputs(program)),
        Check(
            "updates", "each element is updated by one member of the group, or by all from equal inputs", _kept(program)
        ),
        Check("scalars", "every scalar state is replicated and updated on every rank", _scalars(program, common)),
        Check(
            "agreement",
            "no state follows a rank's own data but through reductions over all of it",
            check_placements(program),
        ),
    ]


def _closed(program: SpmdProgram, rank: RankGraph, common: Sequence[RankState]) -> int:
    graph = rank.phase.graph
    known = {*program.training.batch, *program.training.hyper, *graph.initializers, *rank.constants}
    held = [*common, *rank.own]
    known.update(state.input for state in held if state.input in graph.inputs)
    reads = 0
    for node in rank.nodes:
        if node.domain == SPMD:
            raise InvariantError(f"rank {rank.rank} keeps the layout operator {node!r}")
        for name in node.inputs:
            if name and name not in known:
                raise InvariantError(
                    f"rank {rank.rank}: {node.op_type} {node.label!r} reads {name!r}, which it has not"
                )
        for name in node.captures:
            if name not in known:
                raise InvariantError(f"rank {rank.rank}: {node.op_type} {node.label!r} captures {name!r}")
        reads += len(node.inputs)
        known.update(node.outputs)
    for name in (program.training.loss, *program.training.metrics, *(state.output for state in held)):
        if name in graph.outputs and name not in known:
            raise InvariantError(f"rank {rank.rank} does not compute {name!r}")
    return reads


def _calls(program: SpmdProgram, ranks: Sequence[RankGraph]) -> int:
    """Group by group and phase by phase: what each member calls over it, against the first member that was made."""
    made = {rank.rank for rank in ranks}
    groups: dict[tuple[str, str, tuple[int, ...]], dict[int, list[Node]]] = {}
    count = 0
    for rank in ranks:
        members: dict[str, tuple[int, ...]] = {}
        for node in rank.nodes:
            if node.domain == COMM:
                group = str(node.attributes["group"])
                if group not in members:
                    members[group] = program.mesh.members(group, rank.rank)
                groups.setdefault((rank.phase.name, group, members[group]), {}).setdefault(rank.rank, []).append(node)
                count += 1
    for (_, group, all_members), calls in groups.items():
        first = min(calls)
        for rank_number in made.intersection(all_members):
            _same_calls(group, (first, calls[first]), (rank_number, calls.get(rank_number, [])))
    return count


def _same_calls(group: str, mine: tuple[int, list[Node]], theirs: tuple[int, list[Node]]) -> None:
    ranks = f"ranks {mine[0]} and {theirs[0]}"
    if len(mine[1]) != len(theirs[1]):
        raise InvariantError(f"{ranks} make {len(mine[1])} and {len(theirs[1])} calls over {group}")
    for one, other in zip(mine[1], theirs[1]):
        if one is not other and (one.op_type, one.attributes) != (other.op_type, other.attributes):
            raise InvariantError(f"{ranks} differ in a call: {one!r} and {other!r}")


def _tiles(program: SpmdProgram, ranks: Iterable[RankGraph]) -> int:
    """Over all members of one sharding group; skipped when only some ranks are made."""
    types = program.training.graph.types
    ranges: dict[str, list[tuple[int, int]]] = {}
    made = 0
    for rank in ranks:
        made += 1
        for state in rank.states:
            for piece in state.pieces:
                ranges.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    if made != program.mesh.ranks:
        return 0
    groups = program.mesh.ranks // program.members
    for sharded in program.states:
        for part in sharded.slices if sharded.sharded else ():
            place = 0
            for start, stop in sorted(set(ranges.get(part.tensor, []))):
                if start != place:
                    raise InvariantError(f"pieces of {part.tensor!r} leave or repeat elements at {min(start, place)}")
                place = stop
            if place != types[part.tensor].elements or len(ranges[part.tensor]) % groups:
                raise InvariantError(f"pieces of {part.tensor!r} end at {place} of {types[part.tensor].elements}")
    return len(ranges)


def _outputs(program: SpmdProgram) -> int:
    source = program.training.graph
    for name in (program.training.loss, *program.training.metrics):
        if program.graph.types.get(name) != source.types.get(name):
            raise InvariantError(f"output {name!r} changed its type")
    return 1 + len(program.training.metrics)


def _kept(program: SpmdProgram) -> int:
    """Every state of the source is held once."""
    held: dict[str, int] = {}
    for sharded in program.states:
        for part in sharded.slices if not sharded.copy else ():
            held[part.tensor] = held.get(part.tensor, 0) + part.elements
    for state in program.training.states:
        elements = program.training.graph.types[state.tensor].elements
        if held.get(state.tensor) != elements:
            raise InvariantError(f"state {state.tensor!r} is held {held.get(state.tensor, 0)} of {elements} elements")
    return len(held)


def _scalars(program: SpmdProgram, common: Sequence[RankState]) -> int:
    everywhere = {state.input for state in common}
    names = [state.tensor for state in program.training.states if state.kind is StateKind.SCALAR]
    for name in names:
        if name not in everywhere:
            raise InvariantError(f"scalar state {name!r} is not on every rank")
    return len(names)
