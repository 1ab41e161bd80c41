"""Linear walks over a graph, shared by the analyses."""

from __future__ import annotations

from collections.abc import Iterable

from gopt.ir.graph import Graph


class GraphIndex:
    """Who makes and who reads each value, and each node's place in the order. Built fresh, never patched."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = graph.producers()
        self.users = graph.users()
        self.position = {id(node): place for place, node in enumerate(graph.nodes)}

    def defined_at(self, name: str) -> int:
        """Position of the node that makes the value; -1 for an input or a constant."""
        node = self.producers.get(name)
        return -1 if node is None else self.position[id(node)]

    def one_element(self, name: str) -> bool:
        """Whether the value has a static shape of exactly one element."""
        type = self.graph.types.get(name)
        return type is not None and type.elements == 1


def ancestors(index: GraphIndex, values: Iterable[str]) -> tuple[set[int], set[str]]:
    """All nodes (by id) that the values depend on, and every value read on the way, the values included."""
    nodes: set[int] = set()
    seen: set[str] = set()
    stack = list(values)
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        node = index.producers.get(name)
        if node is not None and id(node) not in nodes:
            nodes.add(id(node))
            stack.extend(node.reads)
    return nodes, seen


def descendants(index: GraphIndex, sources: Iterable[str]) -> set[str]:
    """All values that depend on a source, the sources included; one sweep in order."""
    tainted = set(sources)
    tainted.discard("")
    for node in index.graph.nodes:
        if tainted.isdisjoint(node.inputs) and (not node.captures or tainted.isdisjoint(node.captures)):
            continue
        if len(node.outputs) == 1:
            tainted.add(node.outputs[0])
        else:
            tainted.update(filter(None, node.outputs))
    return tainted


def depth(index: GraphIndex) -> dict[str, int]:
    """Nodes on the longest path to each value; 0 is left out. One sweep in order."""
    steps: dict[str, int] = {}
    for node in index.graph.nodes:
        below = max((steps.get(name, 0) for name in node.reads), default=0)
        steps.update((name, below + 1) for name in node.outputs)
    return steps
