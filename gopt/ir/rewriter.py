"""The only place where graphs change: add, remove and rewire nodes, then restore the order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx.numpy_helper import from_array

from gopt.errors import InvariantError
from gopt.ir.graph import Graph, Node
from gopt.ir.topological_order import topological_sort
from gopt.ir.types import TensorType, numpy_dtype
from gopt.records.placements import FULLY_REPLICATED, Sharding

NOTHING: Mapping[str, str] = MappingProxyType({})
_BEHIND = 1e-3
"""Distance in the order between a node and the one it follows; source nodes are 1 apart, so chains stay before the
next.
"""


@dataclass(frozen=True, slots=True)
class Removal:
    """Source nodes lost on some or all ranks, and why; ``of``: the parameter served.

    ``by``: for each node the values replacing the outputs, '' for none; () if nothing is replaced.
    """

    sources: Sequence[Node]
    why: str
    of: str | None = None
    by: Sequence[Sequence[str]] = ()


class GraphRewriter:
    """A batch of changes to one graph by a pass. Nothing is reordered until ``finish``."""

    def __init__(self, graph: Graph, pass_name: str) -> None:
        self.graph = graph
        self.pass_name = pass_name
        self._nodes = graph.nodes
        """The nodes before any change."""
        self.removed: list[Removal] = []
        self._gone: set[int] = set()
        """Removed nodes, by their own id or the id of their source."""
        self._added: list[Node] = []
        self._changed = False
        self._made: dict[str, Node] = {}
        """Value -> the node of this pass that produces it."""
        self._due: dict[int, float] = {}
        """Position at which a node is due, by id, where that is not its place in the graph."""

    @cached_property
    def _places(self) -> dict[str, int]:
        """Value -> the old place of the node making the value, by the names before any change."""
        return {name: index for index, node in enumerate(self._nodes) for name in node.outputs if name}

    def _producer(self, name: str) -> Node | None:
        index = self._places.get(name)
        return None if index is None else self._nodes[index]

    def _when(self, node: Node) -> float:
        """Position at which a node is due."""
        due = self._due.get(id(node))
        return self._places[node.first_output] if due is None else due

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Mapping[str, TensorType],
        *,
        domain: str = "",
        attributes: Mapping[str, Any] | None = None,
        sharding: Sharding = FULLY_REPLICATED,
        after: Node | None = None,
        before: Node | None = None,
    ) -> Node:
        """Add a node making ``outputs``, due right after ``after``, or else before ``before``."""
        node = Node(op_type, inputs, list(outputs), domain=domain, attributes=dict(attributes or {}), sharding=sharding)
        self._add(node, outputs)
        if after is not None:
            self._due[id(node)] = self._when(after) + _BEHIND
        elif before is not None:
            self._due[id(node)] = self._when(before) - 0.25
        return node

    def constant(
        self, name: str, value: np.ndarray | Sequence[int] | float, *, before: Node | None = None,
        sharding: Sharding = FULLY_REPLICATED,
    ) -> str:  # fmt: skip
        """Make ``name`` a constant, unless constant already; returns the name. Numbers in a list are int64, a float is
        a scalar of float32."""
        node = self._made.get(name) or self._producer(name)
        if node is None or self._is_gone(node):
            if isinstance(value, np.ndarray):
                type, attributes = TensorType(value.dtype.name, value.shape), dict[str, Any](value=from_array(value))
            elif isinstance(value, float):
                type, attributes = TensorType("float32", ()), {"value_float": value}
            else:
                type, attributes = TensorType("int64", (len(value),)), {"value_ints": list(value)}
            self.add("Constant", [], {name: type}, attributes=attributes, before=before, sharding=sharding)
        return name

    def repeat(
        self, source: Node, inputs: Sequence[str], outputs: Mapping[str, TensorType], sharding: Sharding
    ) -> Node:
        """Repeat a source node on ``inputs``."""
        attributes = dict(source.attributes)
        node = Node(
            source.op_type, inputs, list(outputs), domain=source.domain, attributes=attributes, sharding=sharding
        )
        node.origin = source.origin
        self._add(node, outputs)
        return node

    def _add(self, node: Node, outputs: Mapping[str, TensorType]) -> None:
        self._changed = True
        node.made_by = self.pass_name
        self.graph.types.update(outputs)
        self._added.append(node)
        self._made.update(dict.fromkeys(node.outputs, node))
        self._due[id(node)] = float("inf")

    def move(self, node: Node, due: float) -> None:
        """Schedule a node at a position of the original order: 7.5 is between nodes 7 and 8.

        Nodes due at one position keep their order. A node whose inputs are produced later follows them directly.
        """
        self._due[id(node)] = due
        self._changed = True

    def latest(self, values: Sequence[str]) -> Node | None:
        """Return the node completing the last of the values; None if a value is an input."""
        producers = [self._made.get(name) or self._producer(name) for name in values]
        nodes = [node for node in producers if node is not None]
        return max(nodes, key=self._when) if len(nodes) == len(producers) else None

    def earliest(self, nodes: Sequence[Node]) -> Node | None:
        """Return the first of some nodes of the graph, None of no nodes."""
        return min(nodes, key=self._when, default=None)

    def between(self, nodes: Sequence[Node]) -> tuple[Node | None, Node | None]:
        """The last node of the graph making an operand of the nodes, and the first of the nodes themselves."""
        producers = [maker for node in nodes for name in node.inputs if (maker := self._producer(name)) is not None]
        return max(producers, key=self._when, default=None), self.earliest(nodes)

    def counterpart(self, source: Node) -> Node:
        """This graph's copy of a node of the source graph."""
        return self._nodes[self._places[source.first_output]]

    def remove(self, source: Node, why: str, *, of: str = "", by: Mapping[str, str] = NOTHING) -> None:
        """Remove this graph's copy of a source node.

        ``of``: the parameter the node serves; ``by``: source value -> replacement.
        """
        replacements = [[by.get(name, "") for name in source.outputs]] if by else ()
        self.remove_all(Removal([source], why, of or None, replacements))

    def remove_all(self, removal: Removal) -> None:
        """Remove this graph's copies of source nodes."""
        self._changed = True
        self._gone.update(map(id, removal.sources))
        self.removed.append(removal)

    def discard(self, output: str) -> None:
        """Remove this graph's node making a value, added by an earlier pass."""
        self._changed = True
        self._gone.add(id(self._nodes[self._places[output]]))

    def annotate(self, source: Node, why: str, *, of: str = "") -> None:
        """Record why a source node does not run on every rank; ``of``: the parameter the node serves."""
        self.removed.append(Removal([source], why, of or None))

    def lookup(self, source: Node) -> Node | None:
        """Return this graph's copy of a source node, None if removed by this or an earlier pass."""
        node = self._producer(source.first_output)
        return None if node is None or self._is_gone(node) else node

    def kept(self) -> Iterator[Node]:
        """Return this graph's nodes in order, without removed and added nodes."""
        return (node for node in self.graph.nodes if not self._is_gone(node))

    def _is_gone(self, node: Node) -> bool:
        return id(node) in self._gone or id(node.source) in self._gone

    def rewire(self, node: Node, old: str, new: str) -> None:
        """Let ``node`` read ``new`` instead of ``old``."""
        node.inputs = [new if name == old else name for name in node.inputs]
        self._changed = True

    def zeros(self, like: str, name: str, shape: str, sharding: Sharding = FULLY_REPLICATED) -> None:
        """Add zeros of the type of a value; ``shape``: the name of the shape, perhaps known on the rank alone."""
        type = self.graph.types[like]
        sizes = {shape: TensorType("int64", (len(type.shape or ()),))}
        self.add("Shape", [like], sizes, sharding=sharding)
        zero = from_array(np.zeros(1, numpy_dtype(type.dtype)))
        self.add("ConstantOfShape", list(sizes), {name: type}, attributes={"value": zero}, sharding=sharding)

    def rename_output(self, node: Node, old: str, new: str) -> None:
        assert old in self._places or old in self._made  # the table is made before the first name changes
        self._due[id(node)] = self._when(node)  # its place is found by its name
        node.outputs = [new if name == old else name for name in node.outputs]
        self.graph.types[new] = self.graph.types[old]

    def finish(self) -> None:
        """Apply the removals and restore a topological order, as near to the old one as dependencies allow."""
        if not self._changed:
            return
        gone, due_at = self._gone, self._due.get
        remaining = [
            (node, index)
            for index, node in enumerate(self.graph.nodes)
            if id(node) not in gone and id(node.source) not in gone
        ]
        if len(self.graph.nodes) - len(remaining) < len(gone):
            raise InvariantError("a node that is to be removed is not in the graph")
        nodes = [node for node, _ in remaining] + [node for node in self._added if id(node) not in gone]
        due = [due_at(id(node), index) for node, index in remaining]
        due += [self._due[id(node)] for node in nodes[len(remaining) :]]
        self.graph.nodes = topological_sort(nodes, due)
        if len(self.graph.nodes) != len(nodes):
            placed = {id(node) for node in self.graph.nodes}
            stuck = next(node for node in nodes if id(node) not in placed)
            raise InvariantError(f"the rewritten graph has a cycle through {stuck.label!r}")
