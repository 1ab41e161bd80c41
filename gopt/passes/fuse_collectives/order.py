"""Candidate orders of the graph, with calls early, or level by level."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from gopt.analysis.training import Phase
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.node_kinds import heavy
from gopt.operators.kinds import REDUCTIONS
from gopt.spmd.program import SpmdProgram

_REDUCTIONS = frozenset(REDUCTIONS)


@dataclass(frozen=True, slots=True)
class CallOrder:
    """A topological order: ``place`` of every node, and the place of the first reader of each call's outputs.

    Every call directly follows its last input, or is at the start of its level. Calls may be fused if the last call
    precedes the first reader of any; the fused call takes the place of the last. Fusing other calls keeps this valid: a
    call moves back, but never past a reader's place, and a fused reader moves back too, so that every reader still
    follows its operands."""

    place: dict[int, int]
    due: dict[int, tuple[int, str]]
    """Call -> place and name of the value that its first reader reads; (number of nodes, '') if there is no reader."""


def orders(program: SpmdProgram, packable: Collection[Node]) -> list[CallOrder]:
    """Return candidate orders; the first is preferred if several are equally good.

    (1) If some calls only finish others (the mean over ``dp`` of a gradient that is a sum over ``tp``), these follow
    the backward level by level. (2) The order of the file. (3) Parallel chains of calls advance side by side.
    ``packable``: the calls that may be fused.

    In all orders the update comes last, so that no reader of a gradient precedes the next gradient.
    """
    late = _update(program)
    nodes = program.graph.nodes
    by_file = sorted(range(len(nodes)), key=lambda at: at in late)
    depth = _depths(program.graph)
    by_depth = sorted(range(len(nodes)), key=lambda at: (at in late, depth[at], at))
    result = [_order(program.graph, [nodes[at] for at in order]) for order in (by_file, by_depth)]
    ids = set(map(id, packable))
    tails = [_levels(program.graph, _unawaited(program.graph, late), ids), _levels(program.graph, late, ids)]
    if not any(tails[0]):
        return result
    levels = [tails[at in late][at] for at in range(len(nodes))]
    by_level = sorted(range(len(nodes)), key=lambda at: (at in late, levels[at], at))
    begins: dict[tuple[bool, int], int] = {}
    for position, at in enumerate(by_level):
        begins.setdefault((at in late, levels[at]), position)
    floors = [begins[at in late, levels[at]] if levels[at] else 0 for at in by_level]
    return [_order(program.graph, [nodes[at] for at in by_level], floors), *result]


def _update(program: SpmdProgram) -> set[int]:
    """Return the places of the update's nodes: nodes of the source's update, and all readers of an update's result or a
    finished sum.

    No other node reads their values, so the rest of the graph can come first."""
    values = {accumulator.input for accumulator in program.accumulators}
    sums = {accumulator.added for accumulator in program.accumulators}
    result = set()
    for position, node in enumerate(program.graph.nodes):
        computes = node.phase is Phase.UPDATE and node.domain != COMM
        if computes or (any(name in values for name in node.reads) and sums.isdisjoint(node.outputs)):
            result.add(position)
            values.update(node.outputs)
    return result


def _depths(graph: Graph) -> list[int]:
    """Return, for each node, the maximum number of calls on a path to the node."""
    behind: dict[str, int] = {}
    result = []
    for node in graph.nodes:
        depth = max([behind.get(name, 0) for name in node.reads], default=0)
        result.append(depth)
        behind.update(dict.fromkeys(node.outputs, depth + (node.domain == COMM)))
    return result


def _unawaited(graph: Graph, late: Container[int]) -> set[int]:
    """Places of nodes of forward and backward for which neither a heavy operator nor a reduction of these waits: the
    operations on a gradient already made by the source."""
    awaited: set[str] = set()
    result = set()
    for at in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[at]
        if at in late:
            continue
        makes = heavy(node) or (node.phase is not None and node.is_in(_REDUCTIONS))
        if makes or not awaited.isdisjoint(node.outputs):
            awaited.update(node.reads)
        else:
            result.add(at)
    return result


def _levels(graph: Graph, among: Container[int], packable: Container[int]) -> list[int]:
    """Return, for each node in ``among``, the maximum number of packable calls on the part of a path within ``among``.

    0 for all other nodes.
    """
    behind: dict[str, int] = {}
    result = [0] * len(graph.nodes)
    for at, node in enumerate(graph.nodes):
        if at in among:
            result[at] = max([behind.get(name, 0) for name in node.reads], default=0)
            behind.update(dict.fromkeys(node.outputs, result[at] + (id(node) in packable)))
    return result


def _order(graph: Graph, nodes: list[Node], floors: Sequence[int] = ()) -> CallOrder:
    """Let every call move up to the last of its inputs, and no further than the floor, a place among ``nodes``."""
    ready: dict[str, int] = {}
    keys = []
    for at, node in enumerate(nodes):
        last, call = at, node.domain == COMM
        if call:
            last = max([floors[at] - 1 if floors else -1, *(ready.get(name, -1) for name in node.reads)])
        keys.append((last, call, at))  # after the node at ``last``, and after the calls that were already placed there
        for name in node.outputs:
            ready[name] = last
    position = {id(nodes[key[2]]): number for number, key in enumerate(sorted(keys))}
    calls = [node for node in nodes if node.domain == COMM]
    due = {id(call): (len(nodes), "") for call in calls}
    sent = {name: id(call) for call in calls for name in call.outputs}
    for node in nodes:
        for name in filter(sent.__contains__, node.reads):
            due[sent[name]] = min(due[sent[name]], (position[id(node)], name))
    return CallOrder(position, due)
