"""Inputs without a stored value that an update adds beside stored states: noise, anchors, values fed in each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from gopt.analysis.state_matching import FACTOR_COST, match_states
from gopt.ir.graph import Graph

Reach = Mapping[str, Mapping[str, int]]


def without_fed(graph: Graph, reach: Reach) -> dict[str, dict[str, int]]:
    """The inputs that each output reads element by element, without fed inputs.

    A fed input has no stored value and a single reader among the outputs, and that output also reads an old value among
    the stored inputs. Everything stays where an output would be left without a state."""
    reachable = {output: dict(depths) for output, depths in reach.items()}
    readers = Counter(name for depths in reach.values() for name in depths)
    rest: dict[str, dict[str, int]] = {}
    for output, operands in reachable.items():
        old = {name: depth for name, depth in operands.items() if name in graph.initializers or readers[name] > 1}
        stored = any(name in graph.initializers and depth < FACTOR_COST for name, depth in old.items())
        rest[output] = old if stored else operands
    if rest == reachable:
        return reachable
    pairs, unsettled = match_states(rest)
    return reachable if unsettled or any(depths and key not in pairs for key, depths in reachable.items()) else rest
