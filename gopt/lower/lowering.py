"""From a program to what is written: every wanted rank's graphs, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gopt.lower.agreement import check_placements
from gopt.lower.invariants import Check, check_ranks
from gopt.lower.phases import phases
from gopt.lower.rank_graph import RankGraph, RankState
from gopt.lower.specialise import Specialiser, common_states
from gopt.program import SpmdProgram
from gopt.sharding.verifier import Shardings


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """The graphs of ranks, phase by phase, the states that all ranks hold whole, and what was asserted."""

    ranks: list[RankGraph]
    common: list[RankState]
    checks: list[Check]


def lower(program: SpmdProgram, ranks: Sequence[int]) -> LoweredProgram:
    """Verify a program, and make the graphs of some of its ranks.

    Raises InvariantError when a rank could go wrong, UnsupportedError where the source itself parts ranks.
    """
    shardings = Shardings(program).infer()
    program.sharded = shardings.parts()
    asked = check_placements(program, shardings)
    specialisers = [Specialiser(program, phase) for phase in phases(program)]
    graphs = [specialiser.rank(rank) for rank in ranks for specialiser in specialisers]
    common = common_states(program)
    return LoweredProgram(graphs, common, check_ranks(program, graphs, common, asked))
