"""The invariants of contract section 6, asserted over all ranks before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gopt.analysis.spmd import Step
from gopt.analysis.training import Kind
from gopt.errors import InvariantError
from gopt.graph.model import COMM, SPMD, Node
from gopt.specialise import RankGraph, RankState


@dataclass(frozen=True, slots=True)
class Check:
    """An invariant that held, and on how many things."""

    name: str
    what: str
    count: int

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "what": self.what, "count": self.count}


def check_ranks(step: Step, ranks: Sequence[RankGraph], common: Sequence[RankState]) -> list[Check]:
    """Raise InvariantError when a rank graph could go wrong; returns what was asserted."""
    reads = sum(_closed(step, rank, common) for rank in ranks)
    return [
        Check("reads", "every value a rank reads is made or given on that rank", reads),
        Check("calls", "all ranks issue the same calls in the same order with the same layout", _calls(ranks)),
        Check(
            "pieces", "the pieces of every sharded state tile its tensor: disjoint and covering", _tiles(step, ranks)
        ),
        Check("outputs", "loss and metrics keep name and type", _outputs(step)),
        Check(
            "updates", "each element is updated by one member of the group, or by all from equal inputs", _kept(step)
        ),
        Check("scalars", "every scalar state is replicated and updated on every rank", _scalars(step, common)),
    ]


def _closed(step: Step, rank: RankGraph, common: Sequence[RankState]) -> int:
    graph = step.graph
    known = {*step.training.batch, *step.training.hyper, *graph.initializers, *rank.constants}
    known.update(state.input for state in common)
    known.update(state.input for state in rank.states)
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
    for name in (step.training.loss, *step.training.metrics, *(s.output for s in (*common, *rank.states))):
        if name not in known:
            raise InvariantError(f"rank {rank.rank} does not compute {name!r}")
    return reads


def _calls(ranks: Sequence[RankGraph]) -> int:
    def calls(rank: RankGraph) -> list[Node]:
        return [node for node in rank.nodes if node.domain == COMM]

    if not ranks:
        return 0
    first = calls(ranks[0])
    for rank in ranks[1:]:
        for mine, theirs in zip(calls(rank), first, strict=True):
            if mine is not theirs and (mine.op_type, mine.attributes) != (theirs.op_type, theirs.attributes):
                raise InvariantError(f"ranks {ranks[0].rank} and {rank.rank} differ in a call: {theirs!r} and {mine!r}")
    return len(first)


def _tiles(step: Step, ranks: Iterable[RankGraph]) -> int:
    """Over all members of one sharding group; skipped when only some ranks are made."""
    types = step.training.graph.types
    ranges: dict[str, list[tuple[int, int]]] = {}
    made = 0
    for rank in ranks:
        made += 1
        for state in rank.states:
            for piece in state.pieces:
                ranges.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    if made != step.mesh.ranks:
        return 0
    groups = step.mesh.ranks // step.members
    for holding in step.holdings:
        for part in holding.parts if holding.sharded else ():
            place = 0
            for start, stop in sorted(set(ranges.get(part.tensor, []))):
                if start != place:
                    raise InvariantError(f"pieces of {part.tensor!r} leave or repeat elements at {min(start, place)}")
                place = stop
            if place != types[part.tensor].elements or len(ranges[part.tensor]) % groups:
                raise InvariantError(f"pieces of {part.tensor!r} end at {place} of {types[part.tensor].elements}")
    return len(ranges)


def _outputs(step: Step) -> int:
    source = step.training.graph
    for name in (step.training.loss, *step.training.metrics):
        if step.graph.types.get(name) != source.types.get(name):
            raise InvariantError(f"output {name!r} changed its type")
    return 1 + len(step.training.metrics)


def _kept(step: Step) -> int:
    """Every state of the source is held by exactly one holding."""
    held: dict[str, int] = {}
    for holding in step.holdings:
        for part in holding.parts if not holding.copy else ():
            held[part.tensor] = held.get(part.tensor, 0) + part.elements
    for state in step.training.states:
        elements = step.training.graph.types[state.tensor].elements
        if held.get(state.tensor) != elements:
            raise InvariantError(f"state {state.tensor!r} is held {held.get(state.tensor, 0)} of {elements} elements")
    return len(held)


def _scalars(step: Step, common: Sequence[RankState]) -> int:
    everywhere = {state.input for state in common}
    names = [state.tensor for state in step.training.states if state.kind is Kind.SCALAR]
    for name in names:
        if name not in everywhere:
            raise InvariantError(f"scalar state {name!r} is not on every rank")
    return len(names)
