"""A rank's graph cut at its collectives: what runs between two calls. Pure; no engine is asked.

What a call or the caller waits for runs as early as it can: right after the last call that it depends on, in file
order. All else runs just before its first reader. So ranks whose forward and backward are alike get equal first
segments, however their updates differ: the part of an update that needs no gradient would be early, and is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gopt.graph.model import COMM, Graph, Node


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes that run together, and the values that cross its border, in order of first use or making."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A collective, with its number among the collectives of the file."""

    index: int
    node: Node

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.node.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.node.outputs if name)


Step: TypeAlias = Segment | Call


def cut(graph: Graph) -> list[Step]:
    """The steps of a graph in the order in which they run. Nodes that make nothing of use are left out."""
    calls, levels = _levels(graph)
    borders = _borders(graph, calls, levels)
    steps: list[Step] = []
    for level, nodes in enumerate(levels):
        segment = _segment(nodes, borders)
        if segment.outputs:
            steps.append(segment)
        if level < len(calls):
            steps.append(Call(level, calls[level]))
    return steps


def dropped(steps: Sequence[Step], keep: Sequence[str]) -> list[tuple[str, ...]]:
    """For every step, the values that no later step reads and that are not in ``keep``: they can go after it."""
    needed = set(keep)
    result: list[tuple[str, ...]] = []
    for step in reversed(steps):
        here = dict.fromkeys((*step.inputs, *step.outputs))
        result.append(tuple(name for name in here if name not in needed))
        needed.update(here)
    return result[::-1]


def _levels(graph: Graph) -> tuple[list[Node], list[list[Node]]]:
    """The calls, and for each and the end the nodes that run before it and after the one before."""
    calls = [node for node in graph.nodes if node.domain == COMM]
    levels: list[list[Node]] = [[] for _ in range(len(calls) + 1)]
    for node, level in zip(graph.nodes, _latest(graph, _earliest(graph)), strict=True):
        if level is not None:
            levels[level].append(node)
    return calls, levels


def _earliest(graph: Graph) -> list[int]:
    """For every node, after how many calls it can run; for a call, its number from 1."""
    result: list[int] = []
    made_at: dict[str, int] = {}
    calls = 0
    for node in graph.nodes:
        calls += node.domain == COMM
        result.append(calls if node.domain == COMM else max((made_at.get(name, 0) for name in node.reads), default=0))
        made_at.update((name, result[-1]) for name in node.outputs if name)
    return result


def _latest(graph: Graph, earliest: Sequence[int]) -> list[int | None]:
    """For every node, after how many calls it is to run; None for calls, and for what nobody reads."""
    awaited = set(graph.outputs).union(*(node.reads for node in graph.nodes if node.domain == COMM))
    due: dict[str, int] = {}
    result: list[int | None] = []
    for node, early in zip(reversed(graph.nodes), reversed(earliest), strict=True):
        levels = [due[name] for name in node.outputs if name in due]
        if node.domain == COMM or not (levels or awaited.intersection(node.outputs)):
            result.append(None)
            continue
        level = early if awaited.intersection(node.outputs) else min(levels)
        result.append(level)
        for name in node.reads:
            due[name] = min(due.get(name, level), level)
    return result[::-1]


def _borders(graph: Graph, calls: Sequence[Node], levels: Sequence[Sequence[Node]]) -> set[str]:
    """Values that are read outside of the segment that makes them, or by the caller."""
    borders = set(graph.outputs)
    borders.update(name for call in calls for name in call.reads)
    for nodes in levels:
        made: set[str] = set()
        for node in nodes:
            borders.update(name for name in node.reads if name not in made)
            made.update(node.outputs)
    return borders


def _segment(nodes: Sequence[Node], borders: set[str]) -> Segment:
    made = {name for node in nodes for name in node.outputs}
    inputs = dict.fromkeys(name for node in nodes for name in node.reads if name not in made)
    outputs = dict.fromkeys(name for node in nodes for name in node.outputs if name and name in borders)
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs))
