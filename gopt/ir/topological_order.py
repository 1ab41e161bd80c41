"""Topological orders of nodes."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from gopt.errors import InputError
from gopt.ir.external_data import show
from gopt.ir.graph import Node


def topological_sort(nodes: Sequence[Node], due: Sequence[float]) -> list[Node]:
    """Return the nodes in a runnable order: of runnable nodes, the node due first, then the node listed first. Nodes on
    or behind a cycle are missing."""
    unmade = {name for node in nodes for name in node.outputs if name}
    waiting: dict[str, list[int]] = {}
    """Value -> nodes that were due before it was made."""
    missing: dict[int, int] = {}
    late: list[tuple[float, int]] = []
    """Nodes that waited and can run now, as a heap: all are due before the next that is looked at."""
    result: list[Node] = []
    for number in sorted(range(len(nodes)), key=due.__getitem__):
        reads = nodes[number].reads
        if not unmade.isdisjoint(reads):
            wanted = unmade.intersection(reads)
            missing[number] = len(wanted)
            for name in wanted:
                waiting.setdefault(name, []).append(number)
            continue
        if not waiting:
            result.append(nodes[number])
            unmade.difference_update(nodes[number].outputs)
            continue
        late.append((due[number], number))
        while late:
            node = nodes[heapq.heappop(late)[1]]
            result.append(node)
            unmade.difference_update(node.outputs)
            for name in node.outputs:
                for reader in waiting.pop(name, ()):
                    missing[reader] -= 1
                    if not missing[reader]:
                        heapq.heappush(late, (due[reader], reader))
    return result


def check_order(nodes: Sequence[Node], defined: set[str]) -> None:
    """Raise InputError, naming the value, unless the nodes can run in file order, as ONNX demands.

    ``defined``: the values no node computes.
    """
    defined_now = set(defined)
    for node in nodes:
        if not (defined_now.issuperset(node.inputs) and defined_now.issuperset(node.captures)):
            break
        defined_now.update(node.outputs)
    else:
        return
    _refuse_undefined(nodes, defined)
    done = topological_sort(nodes, range(len(nodes)))
    if len(done) < len(nodes):
        name = _on_cycle(nodes, {id(node) for node in done})
        raise InputError(f"value {show(name)} depends on itself: the graph has a cycle")
    name = next(name for name in node.reads if name not in defined_now)
    raise InputError(
        f"node {show(node.label)} reads value {show(name)} before a node makes it: the nodes are not in an order in "
        "which they can run",
        "ONNX requires that order: sort the nodes in the program that writes the file",
    )


def _refuse_undefined(nodes: Sequence[Node], inputs: set[str]) -> None:
    defined = {*inputs, *(name for node in nodes for name in node.outputs)}
    for node in nodes:
        for name in node.reads:
            if name not in defined:
                raise InputError(f"value {show(name)} is undefined: node {show(node.label)} reads it, nothing makes it")


def _on_cycle(nodes: Sequence[Node], done: Collection[int]) -> str:
    """Return a value on a cycle: go back from any stuck node, until a node repeats."""
    stuck = [node for node in nodes if id(node) not in done]
    producer = {name: node for node in stuck for name in node.outputs if name}
    node, visited, name = stuck[0], set(), ""
    while id(node) not in visited:
        visited.add(id(node))
        name = next(name for name in node.reads if name in producer)
        node = producer[name]
    return name
