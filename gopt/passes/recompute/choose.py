"""Chooses values of the forward for a second computation in the backward: by rule, or by a minimal cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gopt.analysis.training import Phase
from gopt.ir.graph import Node
from gopt.ir.min_cut import SINK, SOURCE, Network
from gopt.passes.recompute.forward import ForwardValues

PRICES = (*(4.0**-exponent for exponent in range(-1, 9)), 0.0)
"""Prices of an operation in bytes, in decreasing order: a low price means many copies."""


def full(forward: ForwardValues) -> set[str]:
    """All values inside of repeated blocks, without the inputs."""
    inside = {name for _, nodes in forward.blocks for node in nodes for name in node.outputs}
    return _without_views(forward, (inside & forward.makers.keys()) - _limits(forward))


def selective(forward: ForwardValues) -> set[str]:
    """Light values, as far as fewer bytes are saved then."""
    return _cut(forward, PRICES[-2], forward.light)


def cuts(forward: ForwardValues) -> Iterator[set[str]]:
    """Choices with fewer and fewer saved bytes: minimal sums of bytes and priced operations."""
    before, limits = set[str](), _limits(forward)

    def eligible(node: Node) -> bool:
        return limits.isdisjoint(node.outputs) if limits else not forward.joins(node)

    for price in PRICES:
        chosen = _cut(forward, price, eligible)
        if chosen and chosen != before:
            yield chosen
            before = chosen


def _limits(forward: ForwardValues) -> set[str]:
    """The inputs of repeated blocks, and values read behind the last block."""
    inside = {name for _, nodes in forward.blocks for node in nodes for name in node.outputs}
    behind = {
        name for node in forward.graph.nodes if node.phase is Phase.FORWARD and inside.isdisjoint(node.outputs)
        for name in node.reads
    }  # fmt: skip
    return {name for name, _ in forward.blocks} | (inside & behind)


def _without_views(forward: ForwardValues, chosen: set[str]) -> set[str]:
    """Without views of saved values: such a view needs no memory."""
    return {name for name in chosen if forward.root.get(name, name) in chosen}


def _cut(forward: ForwardValues, price: float, eligible: Callable[[Node], bool]) -> set[str]:
    """The values to compute again: a minimal cut between the forward and the reads of the backward.

    A value behind the cut is present in the backward; a node behind the cut runs again, with all operands behind the
    cut. Cutting the edge from a node to a value means saving the value."""
    network, graph = Network(), forward.graph
    values: dict[str, int] = {}
    runs: dict[str, int] = {}
    for node in graph.nodes:
        if node.phase is not Phase.FORWARD:
            continue
        run = network.vertex()
        repeats = node.outputs[0] in forward.makers and eligible(node)
        network.edge(SOURCE, run, price * forward.operations(node) if repeats else math.inf)
        for name in filter(None, node.outputs):
            runs[name], values[name] = run, network.vertex()
            network.edge(run, values[name], math.inf if name in forward.root else forward.nbytes(name))
        for name in node.reads:
            if name in values:
                network.edge(values[name], run, math.inf)
    needed = {
        name for node in graph.nodes if node.phase is Phase.BACKWARD and node.source is not None
        for name in node.inputs if name in values
    }  # fmt: skip
    for name in needed:
        network.edge(values[name], SINK, math.inf)
    behind = network.behind_cut()
    return _without_views(forward, {name for name in forward.makers if runs[name] in behind})
