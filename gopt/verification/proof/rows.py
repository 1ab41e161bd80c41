"""Rows of tables, by number: lookups of rows, and sums of gradients of rows.

A trainer pulls and pushes rows alone, where the source reads and adds to the whole table. A number in a lookup counts
the rows of the table from the start or from the end: any other number fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.operators.kinds import GATHERS, MATRIX_PRODUCTS, RESHAPES, SCATTERS, SPREADS
from gopt.operators.table import operator
from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.evaluation import computed
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import (
    ADDED,
    CONCAT,
    LINEAR,
    LOOKED_UP,
    ONE,
    PERMUTED,
    PRODUCT,
    TAKE,
    Shape,
    elements,
)
from gopt.verification.proof.move_laws import as_type
from gopt.verification.proof.operators import NodeReader
from gopt.verification.proof.selections import Selection
from gopt.verification.proof.stored_values import SMALL

NUMBERS, MERGED = "row numbers", "merged rows"
"""The numbers and the rows of the merged gradient of a part of a table."""
ONE_HOT = "OneHot"
Sizes = tuple[int, ...]


class RowLaws:
    """Lookups and sums of rows in forms without the shape of the numbers."""

    def __init__(self, expressions: Expressions, table: ConstantTable) -> None:
        self.expressions, self.table = expressions, table
        self._known: set[tuple[int, int]] = set()
        """Numbers in lookups, and the rows of the table."""

    def looked_up(self, table: int, numbers: int) -> int | None:
        """Rows of a table in the order of numbers; None for unknown sizes."""
        expressions = self.expressions
        shape, dims = self._sizes(table), self._sizes(numbers)
        if not shape or dims is None:
            return None
        root = expressions.all[expressions.root(table)]
        if root.op == "round":
            inner = self.looked_up(expressions.view(root.operands[0], shape), numbers)
            return inner and as_type(expressions, inner, "float32", str(root.attributes))
        width, whole = elements(shape[1:]) or 0, expressions.root(table)
        parts = [(self._plain(root), start, stop) for root, start, stop in expressions.pieces(numbers)]
        self._known.update((part, shape[0]) for part, _, _ in parts)
        pieces = [
            (expressions.apply(LOOKED_UP, width, [whole, part], (expressions.elements(part), width)),
             start * width, stop * width)
            for part, start, stop in parts
        ]  # fmt: skip
        return expressions.view(expressions.flat(pieces), (*dims, *shape[1:]))

    def added(self, shape: Sizes, numbers: int, rows: int) -> int | None:
        """A table of zeros with rows added to it; None for unknown sizes."""
        expressions, width, sizes = self.expressions, elements(shape[1:]) or 0, self._sizes(numbers)
        if sizes is None or expressions.elements(rows) != (elements(sizes) or 0) * width:
            return None
        joined = expressions.all[expressions.root(rows)]
        if joined.op == CONCAT and joined.attributes == 0:
            rows = expressions.flat(piece for part in joined.operands for piece in expressions.pieces(part))
        flat = shape[0], width
        total, position = [expressions.constant(0, flat)], 0
        for part, start, stop in self._numbers(numbers, shape[0]):
            end = position + (stop - start) * width
            chosen = (
                part if (start, stop) == (0, expressions.elements(part)) else expressions.flat([(part, start, stop)])
            )
            total += self._terms(flat, chosen, expressions.flat(expressions.cut(rows, position, end)))
            position = end
        return expressions.view(expressions.elementwise(expressions.added, total), shape)

    def in_lookups(self, numbers: int, rows: int) -> bool:
        """Return whether numbers stand in lookups in a table of so many rows: any other number fails there."""
        return all((self._plain(root), rows) in self._known for root, _, _ in self.expressions.pieces(numbers))

    def _sizes(self, number: int) -> Sizes | None:
        shape = self.expressions.shape(number)
        return None if shape is None or elements(shape) is None else tuple(int(size or 0) for size in shape)

    def _plain(self, number: int) -> int:
        """Numbers without casts to another type of integers."""
        expression = self.expressions.all[self.expressions.root(number)]
        if expression.op == "cast" and expression.attributes in (("int32", "int64"), ("int64", "int32")):
            return self._plain(expression.operands[0])
        return self.expressions.root(number)

    def _numbers(self, number: int, rows: int) -> list[tuple[int, int, int]]:
        """Numbers of rows, without operators for limits of a table of so many rows on numbers in lookups."""
        parts = []
        for root, start, stop in self.expressions.pieces(number):
            inner = part = self._plain(root)
            while (inner, rows) not in self._known and (front := self._kept(inner, rows)) is not None:
                inner = self._plain(front)
            parts.append((inner if (inner, rows) in self._known else part, start, stop))
        return parts

    def _kept(self, number: int, rows: int) -> int | None:
        """The numbers in front of an operator without effect on numbers of rows, or None."""
        op, attributes, operands, _ = self.expressions.all[number]
        if op == TAKE:
            front = self._kept(operands[0], rows)
            return None if front is None else self.expressions.take(front, cast(Selection, attributes))
        values = [self.expressions.arrays.get(operand) for operand in operands]
        free = [index for index, value in enumerate(values) if value is None]
        if number not in self.table.origins or len(free) != 1 or rows > SMALL or not operator(op).elementwise:
            return None
        numbers = np.arange(-rows, rows)
        values[free[0]] = numbers
        result = computed(*self.table.origins[number], [np.asarray(value) for value in values])
        return operands[free[0]] if ((result - numbers) % rows == 0).all() else None

    def _terms(self, shape: Sizes, numbers: int, rows: int) -> Iterator[int]:
        """The terms of a sum of rows: the sum is linear in the rows."""
        expressions, root = self.expressions, self.expressions.root(rows)
        op, attributes, operands, whole = expressions.all[root]
        if op == LINEAR and all(atom == ONE or expressions.shape(atom) == whole for atom in operands):
            for atom, factor in expressions.terms(root):
                ones = [self._sum(shape, numbers, expressions.constant(1, whole))] if atom == ONE else None
                for number in ones or self._terms(shape, numbers, atom):
                    yield expressions.scaled(number, factor)
            return
        if op == PRODUCT:
            pairs = list(zip(operands, attributes))  # type: ignore[call-overload]
            single = [pair for pair in pairs if expressions.elements(pair[0]) == 1]
            large = [pair for pair in pairs if pair not in single]
            if single and large:
                powers = [1, *(power for _, power in single)]
                for number in self._terms(shape, numbers, expressions.product(*zip(*large))):
                    yield expressions.elementwise(
                        lambda values: expressions.product(values, powers), [number, *(factor for factor, _ in single)]
                    )
                return
        yield self._sum(shape, numbers, root)

    def _sum(self, shape: Sizes, numbers: int, rows: int) -> int:
        return self.expressions.apply(ADDED, shape, [numbers, self.expressions.root(rows)], shape)


class RowReader(NodeReader):
    """Reads lookups, sums of rows and merged rows of tables by ``laws``."""

    def __init__(
        self, expressions: Expressions, graph: Graph, drawn: frozenset[str], table: ConstantTable, laws: RowLaws
    ) -> None:
        super().__init__(expressions, graph, drawn, table)
        self.laws = laws

    def results(self, node: Node, operands: Sequence[int | None], shapes: Sequence[Shape] = ()) -> list[int]:
        numbers = [operand for operand in operands if operand is not None]
        rule = None
        if not node.attributes.get("axis", 0) and not node.attributes.get("batch_dims", 0):
            rule = self._looked_up if node.is_in(GATHERS) else self._scattered if node.is_in(SCATTERS) else None
        if node.is_in(MATRIX_PRODUCTS) and not node.attributes and len(numbers) == 2:
            rule = self._chosen
        number = None if rule is None else rule(node, numbers)
        return super().results(node, operands, shapes) if number is None else [number]

    def _looked_up(self, node: Node, operands: Sequence[int]) -> int | None:
        """Rows of a table, where indices are numbers of rows."""
        table, indices = operands
        shape, dims = self.expressions.shape(table), self.expressions.shape(indices)
        after = self.graph.type_of(node.outputs[0]).shape
        if not shape or dims is None or after not in ((*dims, *shape[1:]), (*dims[:-1], *shape[1:])):
            return None
        if after != (*dims, *shape[1:]) and dims[-1:] != (1,):
            return None
        number = self.laws.looked_up(table, indices)
        return number and self.expressions.view(number, after)

    def _scattered(self, node: Node, operands: Sequence[int]) -> int | None:
        """The sum of a table and of whole rows, or the merged gradient of a part of a table."""
        expressions, (table, indices, rows) = self.expressions, operands
        if node.attributes.get("reduction", "none") != "add":
            return self._merged(table, indices, rows)
        shape, dims, size = (expressions.shape(number) for number in operands)
        if not shape or not dims or any(elements(sizes) is None for sizes in (shape, dims, size)):
            return None
        if size == dims and len(shape) > 1:  # a number for each element of a row
            spread = expressions.all[expressions.root(indices)]
            indices = spread.operands[0] if spread.op in SPREADS else indices
            dims = expressions.shape(indices) or ()
            if dims[:1] != size[:1] or elements(dims[1:]) != 1 or size[1:] != shape[1:]:
                return None
        elif size != dims and (dims[-1] != 1 or size != (*dims[:-1], *shape[1:])):
            return None
        total = self.laws.added(shape, indices, rows)  # type: ignore[arg-type]
        return total and expressions.elementwise(expressions.added, [table, total])

    def _chosen(self, node: Node, operands: Sequence[int]) -> int | None:
        """Rows added by a product with the transposed one-hot matrix of numbers in lookups."""
        expressions, (matrix, rows) = self.expressions, operands
        moved, size = expressions.all[expressions.root(matrix)], expressions.shape(rows) or ()
        if moved.op != PERMUTED or len(size) != 2 or len(expressions.shape(matrix) or ()) != 2:
            return None
        chosen = expressions.all[expressions.root(moved.operands[0])]
        if chosen.op != ONE_HOT or chosen.attributes != ((), 0):
            return None
        numbers, count, values = chosen.operands
        ends, depth = expressions.values.get(expressions.all[expressions.root(values)]), self.table.array(count)
        if ends is None or ends.tolist() != [0, 1] or depth is None or not self.laws.in_lookups(numbers, int(depth)):
            return None
        return self.laws.added((int(depth), int(size[1] or 0)), numbers, rows)

    def _merged(self, table: int, indices: int, rows: int) -> int | None:
        """The merged gradient of a part of a table: zero but for the merged rows."""
        expressions = self.expressions
        shape, merged = expressions.shape(table), expressions.all[expressions.root(rows)]
        while expressions.all[indices].op in RESHAPES:
            indices = expressions.all[indices].operands[0]
        numbers = expressions.all[expressions.root(indices)]
        alike = merged.op == MERGED and numbers.op == NUMBERS and merged.operands == numbers.operands
        if not alike or expressions.uniform(table) != 0 or elements(shape) != expressions.elements(merged.operands[0]):
            return None
        return expressions.view(merged.operands[0], shape)
