"""Values with row numbers of a table: equal numbers, written in another way.

The backward of a lookup names the rows read by the forward. An exporter may write these ids anew: clipped to the table,
wrapped where negative, cast, reshaped, joined, or cut out of the batch a second time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from functools import cached_property

import numpy as np

from gopt.analysis.isomorphism import ValueNumbers
from gopt.analysis.layout_aliases import LAYOUT_OPERATORS, find_aliases
from gopt.ir.constant_folding import as_folded
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.node_kinds import chosen_by, draws, record_of
from gopt.operators.kinds import CASTS, COMBINERS, COMPARISONS, EXTREMES, SPREADS, VIEWS

_WHOLE = frozenset({"int32", "int64"})
_SMALL = 1 << 16
"""Bytes up to which constants are compared by what they hold."""


class RowValues:
    """Content of a graph's values as far as ids and masks of rows need it; each result is cached."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index = GraphIndex(graph)
        self._numbers = ValueNumbers(self._maker, self._leaf, self.root)

    @cached_property
    def _aliases(self) -> dict[str, str]:
        return find_aliases(self.graph)

    def root(self, name: str) -> str:
        """The value equal to ``name`` in type, shape and order."""
        return self._aliases.get(name, name)

    def undone(self, node: Node) -> list[Node]:
        """The readers of a layout operator's result, where each gives back the operator's operand: half of a pair."""
        if len(node.outputs) != 1 or node.outputs[0] in self.graph.outputs or not node.is_in(LAYOUT_OPERATORS):
            return []
        readers = self.index.users.get(node.outputs[0], [])
        source = self.root(node.inputs[0])
        aligned = all(self.root(name) == source for reader in readers for name in reader.outputs)
        return readers if aligned and all(not reader.captures for reader in readers) else []

    def way_to_root(self, name: str) -> list[str]:
        """Return a value, the values from which layout operators compute the value, and the root."""
        way, root = [name], self.root(name)
        while way[-1] != root:
            way.append(self.index.producers[way[-1]].inputs[0])
        return way

    def producer(self, name: str) -> Node | None:
        """The producer of the root of a value; None for an input or an initializer."""
        return self.index.producers.get(self.root(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The static shape of a value, or None."""
        type = self.graph.type_of(name)
        return type.dims if type.static else None

    def constant(self, name: str) -> np.ndarray | None:
        """A constant of the file, of any size; None of any other value."""
        return self.index.constants.value(self.root(name))

    def number(self, name: str) -> float | None:
        """A constant of one element."""
        return self.index.constants.number(self.root(name))

    def zero(self, name: str) -> bool:
        """Return whether a value is a constant, of any size, with zeros everywhere."""
        return self.index.constants.zero(self.root(name))

    # --- the same numbers ---------------------------------------------------------------------------------------------

    def sources(self, name: str) -> frozenset[int]:
        """Numbers of the source values of a lookup's ids."""
        reached = walk([self.plain(name)], lambda value: map(self.plain, self._parts(value)))
        return frozenset(self.value_number(value) for value in reached if not self._parts(value))

    def within(self, name: str, rows: int, numbers: frozenset[int]) -> bool:
        """Return whether all ids of ``name`` are ids of the sources ``numbers``, for a table of ``rows`` rows.

        An id outside the table is an error of the lookup, so that bounds of ids to the table change no valid id."""
        stack = [name]
        while stack:
            *_, last = self._towards(stack.pop(), rows, numbers)
            if self.value_number(last) not in numbers:
                parts = self._parts(last)
                if not parts:
                    return False
                stack.extend(parts)
        return True

    def in_order(self, name: str, rows: int, numbers: frozenset[int]) -> str:
        """The value with the ids of ``name``, each in order, nearest to a known source.

        A negative id counts from the end.
        """
        start, *rest = self._towards(name, rows, numbers)
        return rest[-1] if rest and self.value_number(rest[-1]) in numbers else start

    def _towards(self, name: str, rows: int, numbers: frozenset[int]) -> list[str]:
        """Values with the ids of one value in order, as far as a known source, or as far as possible."""
        way = [self.plain(name)]
        while self.value_number(way[-1]) not in numbers:
            node = self.index.producers.get(way[-1])
            source = "" if node is None else self._bounded(node, rows)
            if not source:
                break
            way.append(self.plain(source))
        return way

    def plain(self, name: str) -> str:
        """The value with the elements of ``name`` in order, nearest the data."""
        while True:
            name = self.root(name)
            node = self.index.producers.get(name)
            if node is None or not node.is_in(VIEWS):
                return name
            name = node.inputs[0]

    def _parts(self, name: str) -> list[str]:
        """Return values with all elements of ``name`` between them, in any order and number; [] for no Concat or
        repetition."""
        node = self.index.producers.get(name)
        if node is None:
            return []
        return node.inputs[:1] if node.is_in(SPREADS) else list(node.inputs) if record_of(node).joins else []

    def _bounded(self, node: Node, rows: int) -> str:
        """The ids that a node takes without changing any id of the table; '' where a change is possible."""
        if node.is_in(CASTS):
            types = {self.graph.type_of(name).dtype for name in (node.inputs[0], node.outputs[0])}
            return node.inputs[0] if types <= _WHOLE and rows < 1 << 31 else ""
        if node.is_a("Clip"):
            low, high = ([*node.inputs, "", ""][slot] for slot in (1, 2))
            return node.inputs[0] if self._at_most(low, -rows) and self._at_least(high, rows - 1) else ""
        if node.is_in(EXTREMES) and len(node.inputs) == 2:
            fits, limit = (self._at_most, -rows) if node.is_in(COMBINERS["max"]) else (self._at_least, rows - 1)
            return next((a for a, b in _both(node) if b and self.constant(b) is not None and fits(b, limit)), "")
        if node.is_a("Mod") and not node.attributes.get("fmod", 0):
            return node.inputs[0] if self.number(node.inputs[1]) == rows else ""
        return self._wrapped(node, rows) if chosen_by(node) else ""

    def _at_most(self, name: str, limit: int) -> bool:
        value = self.number(name) if name else -math.inf
        return value is not None and value <= limit

    def _at_least(self, name: str, limit: int) -> bool:
        value = self.number(name) if name else math.inf
        return value is not None and value >= limit

    def _wrapped(self, node: Node, rows: int) -> str:
        """``Where(ids < 0, ids + rows, ids)``, or the other way round."""
        flag, moved, unmoved = (self.root(name) for name in node.inputs)
        test = self.index.producers.get(flag)
        if test is None or not test.is_in(COMPARISONS) or self.number(test.inputs[1]) != 0:
            return ""
        negative, *others = (bool(as_folded(test, [np.array(id), np.array(0)])) for id in (-1, 0, 1))
        if negative in others:
            return ""
        moved, unmoved = (moved, unmoved) if negative else (unmoved, moved)
        added = self.index.producers.get(moved)
        number = self.value_number(unmoved)
        if added is None or not record_of(added).adds or len(added.inputs) != 2:
            return ""
        if self.value_number(test.inputs[0]) != number:
            return ""
        fits = any(self.value_number(a) == number and self.number(b) == rows for a, b in _both(added))
        return unmoved if fits else ""

    def value_number(self, name: str) -> int:
        """Equal for values that are the same function of the same values; random numbers are equal to themselves."""
        return self._numbers.of_value(name)

    def _maker(self, name: str) -> Node | None:
        node = self.index.producers.get(name)
        return None if node is None or not node.reads or draws(node) else node

    def _leaf(self, name: str) -> Hashable:
        value = self.constant(name) if self.graph.type_of(name).nbytes <= _SMALL else None
        return ("value", name) if value is None else (value.dtype.str, value.shape, value.tobytes())


def _both(node: Node) -> Iterator[tuple[str, str]]:
    """The two operands of a node, in both orders."""
    first, second = node.inputs
    yield from ((first, second), (second, first))
