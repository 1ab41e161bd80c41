"""Pairs of states of one element: step counters, loss scales, schedules. Losses, which look alike, take no part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gopt.analysis.rival_outputs import refuse_rivals
from gopt.analysis.role_map import RoleMap
from gopt.analysis.state_matching import (
    FACTOR_COST,
    match_states,
    reachable_states,
    refuse_contested,
    refuse_crossed,
    refuse_open,
)
from gopt.ir.graph_index import GraphIndex


def pair_scalars(
    index: GraphIndex, pairs: Mapping[str, str], losses: Collection[str], candidates: Sequence[str], roles: RoleMap,
    moving: set[str],
) -> dict[str, str]:  # fmt: skip
    """Update pairs of rank 0, output -> input; losses take no part. ``candidates``: outputs that may be losses."""
    reach = _without_weights(index, scalar_reach(index, pairs, losses, roles, moving), pairs, candidates)
    matched, unsettled = match_states(reach)
    refuse_open(index, unsettled)
    refuse_contested(index, reach, matched)
    refuse_crossed(index, reach, matched)
    refuse_rivals(index, reach, matched)
    return matched


def pair_shown(
    index: GraphIndex, pairs: Mapping[str, str], shown: Collection[str], losses: Collection[str],
    candidates: Sequence[str], roles: RoleMap, moving: set[str],
) -> dict[str, str]:  # fmt: skip
    """Inputs replaced by the scalars ``shown``, input -> output: a running statistic looks like a loss until the
    gradients are known. A factor is not replaced."""
    if not shown:
        return {}
    scalars = pair_scalars(index, pairs, losses, candidates, roles, moving)
    return {
        name: output for output, name in scalars.items()
        if output in shown and reachable_states(index, output, {name}, moving)[name] < FACTOR_COST
    }  # fmt: skip


def may_be_carried(
    index: GraphIndex, pairs: Mapping[str, str], shown: Collection[str], roles: RoleMap, moving: set[str]
) -> set[str]:
    """The scalars among ``shown`` that read an unpaired input as an old value."""
    if len(shown) < 2:
        return set()
    reach = scalar_reach(index, pairs, (), roles, moving)
    return {name for name in shown if any(cost < FACTOR_COST for cost in reach.get(name, {}).values())}


def scalar_reach(
    index: GraphIndex, pairs: Mapping[str, str], losses: Collection[str], roles: RoleMap, moving: set[str]
) -> dict[str, dict[str, int]]:
    graph = index.graph
    free = set(graph.inputs) - set(pairs.values()) - set(roles.batch)
    return {
        output: reachable_states(index, output, free, moving)
        for output, type in graph.outputs.items()
        if output not in pairs and output not in losses and type.shape == ()
    }


def _without_weights(
    index: GraphIndex, reach: Mapping[str, Mapping[str, int]], pairs: Mapping[str, str], losses: Sequence[str]
) -> dict[str, dict[str, int]]:
    """``reach`` without possible weights of a loss: a factor fed anew, where states have stored values.

    ``losses``: outputs that may be losses."""
    stored = index.graph.initializers
    if not any(name in stored for name in pairs.values()):
        return {output: dict(costs) for output, costs in reach.items()}
    return {
        output: {
            name: cost for name, cost in costs.items()
            if output not in losses or cost < FACTOR_COST or name in stored
        }
        for output, costs in reach.items()
    }  # fmt: skip
