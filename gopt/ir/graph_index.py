"""Linear walks over a graph, shared by the analyses."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import value_reads

T = TypeVar("T", bound=Hashable)


class GraphIndex:
    """Producers and users of each value, and the position of each node.

    Each table is built on first use and never updated.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @cached_property
    def producers(self) -> dict[str, Node]:
        """Value name -> the node making the value."""
        return self.graph.producers()

    @cached_property
    def users(self) -> dict[str, list[Node]]:
        """Value name -> the nodes reading the value, in order."""
        return self.graph.users()

    @cached_property
    def position(self) -> dict[int, int]:
        """Each node's place in the order, by id."""
        return {id(node): index for index, node in enumerate(self.graph.nodes)}

    @cached_property
    def definitions(self) -> dict[str, int]:
        """Value name -> position of the node making the value."""
        return {name: index for index, node in enumerate(self.graph.nodes) for name in node.outputs if name}

    @cached_property
    def constants(self) -> Constants:
        """The constants of the graph, including results of nodes on constants."""
        return Constants(self.graph, self.producers)

    @cached_property
    def scalars(self) -> set[str]:
        """The values of a static shape of exactly 1 element."""
        return {name for name, type in self.graph.types.items() if type.elements == 1}

    def defined_at(self, name: str) -> int:
        """Position of the node making the value; -1 for an input or a constant."""
        return self.definitions.get(name, -1)

    def one_element(self, name: str) -> bool:
        """Return whether the value has a static shape of exactly 1 element."""
        return name in self.scalars

    def operands(self, name: str, through: Callable[[Node], bool] | None = None) -> Sequence[str]:
        """Return the operands of a value's node, if ``through`` holds for the node; else none."""
        node = self.producers.get(name)
        return node.reads if node is not None and (through is None or through(node)) else ()

    def results(self, name: str, through: Callable[[Node], bool] | None = None) -> Iterator[str]:
        """Return the results of a value's readers, if ``through`` holds for the reader."""
        users = self.users.get(name, ())
        return (output for node in users if through is None or through(node) for output in node.outputs if output)


def walk(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield everything reached from ``starts`` once, but not ''. Successors are asked for lazily, so a loop may stop
    early."""
    stack, reached = [*starts], set[T]()
    while stack:
        top = stack.pop()
        if top != "" and top not in reached:
            reached.add(top)
            yield top
            stack.extend(following(top))


def made_of(index: GraphIndex, values: Iterable[str]) -> Iterator[str]:
    """Yield the values, and all values whose elements influence them: no value read for a shape or a type alone."""
    producers = index.producers
    return walk(values, lambda name: value_reads(producers[name]) if name in producers else ())


def copy_chain(producers: Mapping[str, Node], name: str, through: Container[str] = ("Identity",)) -> list[str]:
    """A value, and the sources of copies in front, or of operators ``through``, the nearest first."""
    chain = [name]
    while (node := producers.get(chain[-1])) is not None and node.is_in(through):
        chain.append(node.inputs[0])
    return chain


def copied_from(index: GraphIndex, name: str) -> str:
    """The value a value is, through copies."""
    return copy_chain(index.producers, name)[-1]


def ancestors(index: GraphIndex, values: Iterable[str]) -> tuple[set[int], set[str]]:
    """Return all nodes (by id) that values depend on, and every value read on the way, including the values."""
    nodes: set[int] = set()

    def following(name: str) -> Sequence[str]:
        node = index.producers.get(name)
        if node is None or id(node) in nodes:
            return ()
        nodes.add(id(node))
        return node.reads

    return nodes, set(walk(values, following))


def descendants(index: GraphIndex, sources: Iterable[str]) -> set[str]:
    """Return all values depending on a source, with the sources; a sweep in order."""
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


def parts_of(nodes: Sequence[Node], wholes: Mapping[str, int]) -> dict[str, int]:
    """Return value -> bits of all wholes made from the value; a sweep in reverse order. ``wholes``: value -> bits."""
    bits_of = dict(wholes)
    for node in reversed(nodes):
        bits = 0
        for name in node.outputs:
            bits |= bits_of.get(name, 0)
        if bits:
            for name in node.reads:
                bits_of[name] = bits_of.get(name, 0) | bits
    return bits_of


def depth(index: GraphIndex) -> dict[str, int]:
    """Nodes on the longest path to each value; 0 is left out. A sweep in order."""
    steps: dict[str, int] = {}
    for node in index.graph.nodes:
        below = max((steps.get(name, 0) for name in node.reads), default=0)
        steps.update((name, below + 1) for name in node.outputs)
    return steps
