"""Where calls may stand: one order of the graph in which every call stands as early as it can."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.training import Phase
from gopt.ir.graph import COMM, Graph, Node
from gopt.program import SpmdProgram


@dataclass(frozen=True, slots=True)
class Order:
    """A topological order: ``place`` of every node, and when the first reader of a call's outputs stands.

    Every call stands right behind the last of its inputs. Calls may be fused when the last of them stands before the
    first reader of any: the fused call takes the place of that last one. Whatever other calls are fused as well, this
    stays an order: calls move back alone, never past a reader's place here, and a reader that is fused itself moves
    back too, so that every reader still stands behind what it reads.
    """

    place: dict[int, int]
    due: dict[int, tuple[int, str]]
    """Of a call: the place of the first reader, and the value it reads; the number of nodes and '' for none."""


def orders(program: SpmdProgram) -> list[Order]:
    """Two orders to choose from: the file's, and one in which parallel chains of calls advance side by side.

    In both the update comes last, so that a gradient's reader does not stand before the next gradient.
    """
    late = _update(program)
    nodes = program.graph.nodes
    by_file = sorted(range(len(nodes)), key=lambda at: at in late)
    depth = _depths(program.graph)
    by_depth = sorted(range(len(nodes)), key=lambda at: (at in late, depth[at], at))
    return [_order(program.graph, [nodes[at] for at in order]) for order in (by_file, by_depth)]


def _update(program: SpmdProgram) -> set[int]:
    """Places of the nodes of the update: the source's, and all that reads what an update node makes, or a finished sum.

    Nothing else reads their values, so the rest of the graph can stand before them.
    """
    values = {held.input for held in program.accumulators}
    sums = {held.added for held in program.accumulators}
    found = set()
    for place, node in enumerate(program.graph.nodes):
        own = node.phase is Phase.UPDATE and node.domain != COMM
        if own or (any(name in values for name in node.reads) and sums.isdisjoint(node.outputs)):
            found.add(place)
            values.update(node.outputs)
    return found


def _depths(graph: Graph) -> list[int]:
    """How many calls stand before each node on any way to it, at most."""
    behind: dict[str, int] = {}
    result = []
    for node in graph.nodes:
        depth = max([behind.get(name, 0) for name in node.reads], default=0)
        result.append(depth)
        behind.update(dict.fromkeys(node.outputs, depth + (node.domain == COMM)))
    return result


def _order(graph: Graph, nodes: list[Node]) -> Order:
    """Let every call move up to the last of its inputs."""
    ready: dict[str, int] = {}
    keys = []
    for at, node in enumerate(nodes):
        last = max([ready.get(name, -1) for name in node.reads], default=-1)
        call = node.domain == COMM
        # Behind the node that stands at ``last``, and behind the calls there that came before it.
        keys.append((last if call else at, call, at))
        ready.update(dict.fromkeys(node.outputs, keys[-1][0]))
    place = {id(nodes[key[2]]): number for number, key in enumerate(sorted(keys))}
    calls = [node for node in nodes if node.domain == COMM]
    due = {id(call): (len(nodes), "") for call in calls}
    sent = {name: id(call) for call in calls for name in call.outputs}
    for node in nodes:
        for name in node.reads:
            if name in sent:
                due[sent[name]] = min(due[sent[name]], (place[id(node)], name))
    return Order(place, due)
