"""Splits a rank's graph at collectives into segments. A pure function of the graph.

The order of the file is the schedule: pass ``overlap`` has moved every call to its start, and its readers as late as
possible. A segment holds the nodes between two calls; calls overlap the segments after them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from gopt.ir.graph import COMM, RECOMPUTE, Graph, Node
from gopt.ir.host_copies import HOST


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes that run together. Inputs are in the order of first use, outputs in the order of the nodes."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    on_host: bool = False
    """The nodes run on the host, beside a device."""

    @property
    def title(self) -> str:
        """The name in a trace."""
        return f"segment of {len(self.nodes)}"


@dataclass(frozen=True, slots=True)
class OverwritingSegment:
    """A segment whose results may overwrite operands: those named by ``rows``."""

    segment: Segment
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallStep:
    """A collective, with an index among the collectives of the file."""

    index: int
    node: Node

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.node.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.node.outputs if name)


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Copies between the memory of a device and of the host, all in one direction; operands and results in order."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


ProgramStep: TypeAlias = Segment | CallStep | CopyStep


def partition(graph: Graph, hosted: Set[str] = frozenset()) -> list[ProgramStep]:
    """The steps of a graph in run order, without nodes of unused results. ``hosted``: values on the host."""
    calls, levels = _levels(graph)
    pieces = [_pieces(nodes, hosted) for nodes in levels]
    boundary = _boundary_values(graph, calls, [nodes for level in pieces for nodes in level])
    steps: list[ProgramStep] = []
    for level, parts in enumerate(pieces):
        segments = (_step(nodes, boundary, hosted) for nodes in parts if nodes)
        steps += [segment for segment in segments if segment.outputs]
        if level < len(calls):
            steps.append(CallStep(level, calls[level]))
    return steps


def last_uses(steps: Sequence[ProgramStep], keep: Sequence[str]) -> list[tuple[str, ...]]:
    """For every step, the values last used there, without the values in ``keep``."""
    needed = set(keep)
    result: list[tuple[str, ...]] = []
    for step in reversed(steps):
        values = dict.fromkeys((*step.inputs, *step.outputs))
        result.append(tuple(name for name in values if name not in needed))
        needed.update(values)
    return result[::-1]


def _levels(graph: Graph) -> tuple[list[Node], list[list[Node]]]:
    """The calls, and the nodes before each and after the last. Nodes of unused results are left out."""
    calls = [node for node in graph.nodes if node.domain == COMM]
    levels: list[list[Node]] = [[] for _ in range(len(calls) + 1)]
    needed = set(graph.outputs)
    level = len(calls)
    for node in reversed(graph.nodes):
        if node.domain == COMM:
            level -= 1
        elif needed.isdisjoint(node.outputs):
            continue
        else:
            levels[level].append(node)
        needed.update(node.reads)
    return calls, [nodes[::-1] for nodes in levels]


def _pieces(nodes: Sequence[Node], hosted: Set[str]) -> list[list[Node]]:
    """The nodes, cut in front of each row of nodes that run a second time, around copies, and between the sides."""
    pieces: list[list[Node]] = []
    for _, side in groupby(nodes, lambda node: _side(node, hosted)):
        pieces.append([])
        again = False
        for node in side:
            if (node.made_by == RECOMPUTE) > again:
                pieces.append([])
            again = node.made_by == RECOMPUTE
            pieces[-1].append(node)
    return pieces


def _side(node: Node, hosted: Set[str]) -> tuple[str, bool]:
    """The direction of a copy, or '', and whether the node runs on the host."""
    return (node.op_type, False) if node.domain == HOST else ("", not hosted.isdisjoint(node.outputs))


def _boundary_values(graph: Graph, calls: Sequence[Node], levels: Sequence[Sequence[Node]]) -> set[str]:
    """Values read outside the producing segment, or by the caller."""
    boundary = set(graph.outputs)
    boundary.update(name for call in calls for name in call.reads)
    for nodes in levels:
        results: set[str] = set()
        for node in nodes:
            boundary.update(name for name in node.reads if name not in results)
            results.update(node.outputs)
    return boundary


def _step(nodes: Sequence[Node], boundary: set[str], hosted: Set[str]) -> Segment | CopyStep:
    if nodes[0].domain == HOST:
        pairs = [(node.inputs[0], node.outputs[0]) for node in nodes]
        return CopyStep(nodes[0].op_type, tuple(old for old, _ in pairs), tuple(new for _, new in pairs))
    return _segment(nodes, boundary, not hosted.isdisjoint(nodes[0].outputs))


def _segment(nodes: Sequence[Node], boundary: set[str], on_host: bool) -> Segment:
    results = {name for node in nodes for name in node.outputs}
    inputs = dict.fromkeys(name for node in nodes for name in node.reads if name not in results)
    outputs = dict.fromkeys(name for node in nodes for name in node.outputs if name and name in boundary)
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs), on_host)
