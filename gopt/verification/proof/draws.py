"""The places where ranks draw random values."""

from __future__ import annotations

from collections.abc import Iterator

from gopt.errors import UnsupportedError
from gopt.ir.node_kinds import draws
from gopt.records.mesh import PIPELINE
from gopt.text.sanitize import show
from gopt.verification.proof.expected import MICRO
from gopt.verification.proof.relation import ProofRelation, RankRelation


def axes_of_draws(relation: ProofRelation) -> frozenset[str]:
    """The axes along which members draw apart, on the same samples too.

    A value that one stage of a pipeline draws alone is the same for all stages. Raises UnsupportedError for a value
    that several files of a rank draw: each file would draw values of its own."""
    axes = {axis for axis, size in relation.mesh.axes if size > 1}
    if relation.accumulate > 1:
        axes.add(MICRO)
    if relation.plan is None and (PIPELINE in axes or len(relation.schedule) > 1):
        members = _drawing_members(relation)
        if all(len(of) == 1 for of in members.values()):
            axes.discard(PIPELINE)
    return frozenset(axes)


def _drawing_members(relation: ProofRelation) -> dict[str, set[int]]:
    """Drawn value -> the stages' members that draw the value."""
    members: dict[str, set[int]] = {}
    for rank in {rank.likeness: rank for rank in reversed(relation.ranks)}.values():
        member = relation.mesh.coordinates(rank.rank).get(PIPELINE, 0)
        phases: dict[str, str] = {}
        for phase, name in _drawn(rank):
            if phases.setdefault(name, phase) != phase:
                raise UnsupportedError(
                    f"rank {rank.rank} draws {show(name)} in {phases[name]} and again in {phase}",
                    "let one file draw the value, and hand it to the other",
                )
            members.setdefault(name, set()).add(member)
    return members


def _drawn(rank: RankRelation) -> Iterator[tuple[str, str]]:
    """The values drawn by a rank, each with the phase of the file."""
    for phase, graph in rank.graphs.items():
        for node in graph.nodes:
            yield from ((phase, name) for name in (node.outputs if draws(node) else ()))
