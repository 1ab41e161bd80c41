"""Finds values equal to others in the same layout: results of layout operators without effect.

An exporter leaves an Identity before an output, a Reshape to the same shape, a pair of Transposes around a clip. An
optimizer joins all gradients into one row and splits the row again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import elementwise, order_of, record_of
from gopt.ir.opaque.origin import Origin
from gopt.operators.kinds import COPIES, PARTS, RESHAPES, VARIADIC

SHAPE_CHANGES = RESHAPES | {"Expand"}
KEEP_ORDER = frozenset((*SHAPE_CHANGES, "Transpose"))
"""Operators that may keep all elements in their order."""
LAYOUT_OPERATORS = frozenset((*COPIES, *VARIADIC, *SHAPE_CHANGES, *PARTS, "Transpose"))


def find_aliases(graph: Graph, named: Collection[str] = (), *, scaled: bool = False) -> dict[str, str]:
    """Values equal to another value in type, elements and order -> that value, the root; one sweep in order.

    Bodies of opaque operators stay untouched: each becomes the operator again unchanged. No operator behind ``named``,
    the user's gradients, is looked through: the operator that turns such a gradient back reads the named value.
    ``scaled``: a join counts as equal to an elementwise result of the join and one-element values: a clipped row."""
    finder = _Finder(graph, frozenset(named))
    for node in graph.nodes:
        if scaled and elementwise(node):
            finder.scale(node)
        if node.op_type in LAYOUT_OPERATORS and node.is_in(LAYOUT_OPERATORS) and any(node.inputs[:1]):
            if of_operator(node):
                continue
            finder.visit(node)
    return finder.aliases


def of_operator(node: Node) -> bool:
    """Return whether a node comes from the body of a known optimizer operator, not from a function of the model."""
    return isinstance(node.origin, Origin) and node.origin.call.operator is not None


@dataclass(frozen=True, slots=True)
class _Layout:
    """A value as a layout operator over ``base``: ``perm`` of a Transpose, None of a Reshape."""

    base: str
    perm: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Join:
    """A Concat: the start and the length of each operand along ``axis`` -> the operand."""

    axis: int
    operands: dict[tuple[int, int], str]


@dataclass
class _Finder:
    graph: Graph
    named: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    layouts: dict[str, _Layout] = field(default_factory=dict)
    joins: dict[str, _Join] = field(default_factory=dict)
    reshaped: dict[tuple[str, object], str] = field(default_factory=dict)
    """(base, shape) -> the first value that is the base in that shape."""

    @cached_property
    def constants(self) -> Constants:
        """The constants of the graph: few graphs cut a row at the joints, and need constants."""
        return Constants(self.graph)

    def visit(self, node: Node) -> None:
        if len(node.outputs) == 1:
            self._look_at_one(node, self.aliases.get(node.inputs[0], node.inputs[0]), node.outputs[0])
        if node.is_in(PARTS):
            self._cut(node)

    def scale(self, node: Node) -> None:
        types = self.graph.type_of
        whole = [name for name in node.inputs if name and types(name).elements != 1]
        row = self.aliases.get(whole[0], whole[0]) if len(whole) == 1 else ""
        if row in self.joins and types(row).shape == types(node.outputs[0]).shape:
            self.aliases[node.outputs[0]] = row

    def _look_at_one(self, node: Node, source: str, output: str) -> None:
        if self._copies(node, source, output):
            self.aliases[output] = source
            return
        if record_of(node).joins:
            self._join(node)
            return
        layout = _layout(self.graph, node, source, output)
        if layout is None:
            return
        layout = _composed(layout, self.layouts.get(source))
        if self._changes_nothing(layout, output):
            self.aliases[output] = layout.base
            return
        if output in self.named:
            return
        self.layouts[output] = layout
        if layout.perm is None:
            canonical = self.reshaped.setdefault((layout.base, self.graph.type_of(output).shape), output)
            if canonical != output:
                self.aliases[output] = canonical

    def _copies(self, node: Node, source: str, output: str) -> bool:
        if node.is_a("Identity"):
            return True
        if node.is_in(COPIES):
            dtype = self.graph.type_of(source).dtype
            return dtype != "undefined" and dtype == self.graph.type_of(output).dtype
        return node.is_in(VARIADIC) and len(node.inputs) == 1

    def _changes_nothing(self, layout: _Layout, output: str) -> bool:
        if layout.perm is not None:
            return list(layout.perm) == sorted(layout.perm)
        return self.graph.type_of(layout.base).shape == self.graph.type_of(output).shape

    def _join(self, node: Node) -> None:
        types = [self.graph.type_of(name) for name in node.inputs]
        if not all(type.static and type.shape for type in types):
            return
        axis = node.attributes["axis"] % len(types[0].dims)
        operands: dict[tuple[int, int], str] = {}
        start = 0
        for name, type in zip(node.inputs, types):
            operands[start, type.dims[axis]] = self.aliases.get(name, name)
            start += type.dims[axis]
        self.joins[node.outputs[0]] = _Join(axis, operands)

    def _cut(self, node: Node) -> None:
        """The pieces of a join equal to whole operands."""
        join = self.joins.get(self.aliases.get(node.inputs[0], node.inputs[0]))
        if join is None:
            return
        for output, (axis, start, size) in zip(node.outputs, self._pieces(node), strict=False):
            if output and axis == join.axis and (start, size) in join.operands:
                self.aliases[output] = join.operands[start, size]

    def _pieces(self, node: Node) -> list[tuple[int, int, int]]:
        """(axis, start, size) of each output of a cut; empty for unknown bounds, or for a cut of more than one axis."""
        whole, cut = self.graph.type_of(node.inputs[0]), [self.graph.type_of(name) for name in node.outputs]
        if not whole.static or not all(type.static for type in cut):
            return []
        if node.is_a("Split"):
            axis = node.attributes.get("axis", 0) % len(whole.dims)
            starts = np.cumsum([0, *(type.dims[axis] for type in cut)]).tolist()
            return [(axis, start, type.dims[axis]) for start, type in zip(starts, cut)]
        bounds = [self._integers(name) for name in node.inputs[1:]]
        if len(bounds) < 2 or any(values is None or len(values) != 1 for values in bounds):
            return []
        start, axis, step = (bounds[slot][0] if len(bounds) > slot and bounds[slot] else default  # type: ignore[index]
                             for slot, default in ((0, 0), (2, 0), (3, 1)))  # fmt: skip
        axis %= len(whole.dims)
        length = whole.dims[axis]
        start = min(max(start + length if start < 0 else start, 0), length)
        return [(axis, start, cut[0].dims[axis])] if step == 1 else []

    def _integers(self, name: str) -> list[int] | None:
        """The elements of a constant of whole numbers; None of any other value."""
        if self.graph.type_of(name).dtype not in ("int64", "int32"):
            return None
        value = self.constants.value(name)
        return None if value is None else [int(number) for number in value.reshape(-1)]


def _layout(graph: Graph, node: Node, source: str, output: str) -> _Layout | None:
    """The node as a layout operator that keeps all elements; None for any other node, or for open shapes."""
    old, new = graph.type_of(source), graph.type_of(output)
    if not (old.static and new.static) or old.elements != new.elements:
        return None
    if (perm := order_of(node, len(old.dims))) is not None:
        moved = [axis for axis in perm if old.dims[axis] != 1]
        return _Layout(source, None if moved == sorted(moved) else perm)
    return _Layout(source, None) if node.is_in(SHAPE_CHANGES) else None


def keeps_order(graph: Graph, node: Node) -> bool:
    """Return whether a node keeps all elements of the operand, in order, in any shape."""
    if not node.is_in(KEEP_ORDER) or len(node.outputs) != 1 or not node.inputs[0]:
        return False
    layout = _layout(graph, node, node.inputs[0], node.outputs[0])
    return layout is not None and layout.perm is None


def identity(node: Node, of: str | None = None) -> Node:
    """An Identity in the place of a node, of the node's first operand or another value."""
    alias = Node("Identity", [of or node.inputs[0]], node.outputs, name=node.name)
    alias.proto = alias.to_proto()
    return alias


def _composed(outer: _Layout, inner: _Layout | None) -> _Layout:
    """Two layout operators in a row as one operator, for two of the same kind."""
    if inner is None or (inner.perm is None) != (outer.perm is None):
        return outer
    if outer.perm is None or inner.perm is None:
        return _Layout(inner.base, None)
    return _Layout(inner.base, tuple(inner.perm[axis] for axis in outer.perm))
