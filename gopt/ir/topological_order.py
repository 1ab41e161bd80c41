"""Topological orders of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from gopt.errors import InputError
from gopt.ir.external_data import show
from gopt.ir.graph import Node


def topological_sort(nodes: Sequence[Node], due: Sequence[float]) -> list[Node]:
    """The nodes in an order in which they can run: of those that can, the one that is due first, then the first listed.

    Nodes on a cycle, or behind one, are missing from it.
    """
    producer = {name: place for place, node in enumerate(nodes) for name in node.outputs if name}
    waits = [0] * len(nodes)
    users: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for before in {producer[name] for name in node.reads if name in producer}:
            waits[place] += 1
            users[before].append(place)
    ready = [(due[place], place) for place, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    result: list[Node] = []
    while ready:
        _, place = heapq.heappop(ready)
        result.append(nodes[place])
        for reader in users[place]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (due[reader], reader))
    return result


def check_order(nodes: Sequence[Node], given: set[str]) -> None:
    """Raise InputError unless the nodes can run in file order, as ONNX demands: for the value that stands in the way.

    ``given``: the values that no node makes.
    """
    made = set(given)
    for node in nodes:
        if not (made.issuperset(node.inputs) and made.issuperset(node.captures)):
            break
        made.update(node.outputs)
    else:
        return
    _refuse_undefined(nodes, given)
    done = topological_sort(nodes, range(len(nodes)))
    if len(done) < len(nodes):
        name = _on_cycle(nodes, {id(node) for node in done})
        raise InputError(f"value {show(name)} depends on itself: the graph has a cycle")
    name = next(name for name in node.reads if name not in made)
    raise InputError(
        f"node {show(node.label)} reads value {show(name)} before a node makes it: the nodes are not in an order in "
        "which they can run",
        "ONNX asks for that order: sort the nodes where the file is made",
    )


def _refuse_undefined(nodes: Sequence[Node], given: set[str]) -> None:
    made = {*given, *(name for node in nodes for name in node.outputs)}
    for node in nodes:
        for name in node.reads:
            if name not in made:
                raise InputError(f"value {show(name)} is undefined: node {show(node.label)} reads it, nothing makes it")


def _on_cycle(nodes: Sequence[Node], done: Collection[int]) -> str:
    """A value on a cycle: back from any node that never became ready, until one comes round again."""
    stuck = [node for node in nodes if id(node) not in done]
    producer = {name: node for node in stuck for name in node.outputs if name}
    node, seen, name = stuck[0], set(), ""
    while id(node) not in seen:
        seen.add(id(node))
        name = next(name for name in node.reads if name in producer)
        node = producer[name]
    return name
