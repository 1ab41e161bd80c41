"""From a program to files: every wanted rank's graphs, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gopt.errors import InvariantError
from gopt.ir.phase import complete_phases
from gopt.lower.agreement import check_placements
from gopt.lower.carried_values import check_carried_values, followed_states
from gopt.lower.invariants import check_ranks
from gopt.lower.phases import phases
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.lower.refolded import check_refolded
from gopt.lower.specialise import Specialiser, common_states
from gopt.lower.variants import check_variants
from gopt.records.checks import Check
from gopt.spmd.bucket_order import check_bucket_order
from gopt.spmd.kept_nodes import check_kept_nodes
from gopt.spmd.program import SpmdProgram
from gopt.spmd.scalar_order import check_scalar_order
from gopt.spmd.verifier import infer_shardings
from gopt.system.background import Task, begin_all
from gopt.system.progress import ProgressCallback, no_progress


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """The graphs of ranks, phase by phase, the states held whole by all ranks, and the checks."""

    ranks: list[RankGraph]
    common: list[RankState]
    checks: list[Check]
    beside: Task[Any]
    """The work that was asked for beside this."""
    kinds: Callable[[int], list[RankGraph]] = lambda _: []
    """The graphs of any rank, with the peers of the rank in each graph."""


def lower(
    program: SpmdProgram,
    ranks: Sequence[int],
    advance: ProgressCallback = no_progress,
    beside: Callable[[], Any] = lambda: None,
) -> LoweredProgram:
    """Verify a program, and make the graphs of some of its ranks.

    ``beside``: work on the finished program, in a process shared with checks. Raises InvariantError if a rank could go
    wrong, UnsupportedError if the source itself parts ranks.
    """
    advance("checking the program")
    check_variants(program)
    for variant in program.variants:
        complete_phases(variant.graph.nodes)
        followed_states(variant.training)  # a process has begun with it, whose answer its sisters cannot read

    checked, task = begin_all([lambda: _check_values(program), beside], len(program.source.graph.nodes))
    agreed = 0
    for variant in program.variants:
        shardings = infer_shardings(variant)
        variant.sharded = shardings.parts()
        agreed += check_placements(variant, shardings)
    if not checked.begun:
        checked.result()
    try:
        specialisers = {
            id(variant): [Specialiser(variant, phase) for phase in phases(variant)] for variant in program.variants
        }
        graphs = []
        for number, rank in enumerate(ranks, 1):
            graphs += [item.rank(rank) for item in specialisers[id(program.of(rank))]]
            advance("making ranks", number, len(ranks))
        advance("checking ranks")
        common = common_states(program)
        checks = check_ranks(program, graphs, common, agreed)
    except InvariantError:
        checked.result()  # it may say more: which rule the program breaks
        raise
    checked.result()
    return LoweredProgram(
        graphs, common, checks, task, lambda rank: [item.kind(rank) for item in specialisers[id(program.of(rank))]]
    )


def _check_values(program: SpmdProgram) -> None:
    """Check properties beyond shardings: owners of elements, operands, old values."""
    for variant in program.variants:
        check_bucket_order(variant)
        check_carried_values(variant)
        check_refolded(variant)
        check_kept_nodes(variant)
        check_scalar_order(variant)
