"""Results of a collective, from the expressions of all members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from math import prod
from typing import Any

from gopt.collectives.node import parse_shapes
from gopt.errors import UnsupportedError
from gopt.ir.graph import Node
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import EXTREMES
from gopt.verification.proof.selections import along

Member = Mapping[str, int]
"""The index of a member along each axis of its group."""
Results = list[list[int] | None]
"""The results of each member; None where they are undefined."""


class Members:
    """The members of a call; ``all_coordinates``: of each member, in group order."""

    def __init__(self, expressions: Expressions, axes: Sequence[str], all_coordinates: Sequence[Member]) -> None:
        self.expressions, self.axes, self.all_coordinates = expressions, tuple(axes), all_coordinates

    def call(self, node: Node, operands: Sequence[Sequence[int]]) -> Results:
        """The results of all members; ``operands``: of each member. Raises UnsupportedError for other calls."""
        rule = _RULES.get(node.op_type)
        if rule is None:
            raise UnsupportedError(
                f"{node.op_type} {node.label!r}: gopt prove has no law for this call",
                f"calls with laws are {', '.join(_RULES)}",
            )
        return rule(self, node.attributes, operands)

    # --- one operand of all members ---

    def reduced(self, numbers: Sequence[int], how: str) -> int:
        """The reduction of a value of each member."""
        expressions = self.expressions
        if numbers.count(numbers[0]) == len(numbers):
            return expressions.reduced(numbers[0], self.axes, how)
        alike = frozenset(axis for axis in self.axes if self._alike(numbers, axis))
        chosen = [
            (number, coordinates)
            for number, coordinates in zip(numbers, self.all_coordinates)
            if all(coordinates[axis] == 0 for axis in alike)
        ]
        values = [
            expressions.on_member(
                expressions.reduced(number, alike, how),
                {axis: coordinates[axis] for axis in self.axes if axis not in alike},
            )
            for number, coordinates in chosen
        ]
        if len(values) == 1:
            return values[0]
        if how in ("sum", "mean"):
            total = expressions.sum_of(values)
            return expressions.scaled(total, Fraction(1, len(values))) if how == "mean" else total
        op = EXTREMES[how]
        if expressions.elements(values[0]) == 1:
            joined = expressions.joined_extremes(op, values)
            return expressions.extreme(op, values, expressions.shape(values[0])) if joined is None else joined

        def make(parts: Sequence[int]) -> int:
            joined = expressions.joined_extremes(op, parts)
            shape = expressions.shape(parts[0])
            return expressions.apply(op, "members", sorted(set(parts)), shape) if joined is None else joined

        return expressions.elementwise(make, values)

    def _alike(self, numbers: Sequence[int], axis: str) -> bool:
        """Return whether members along an axis have the same expression."""
        by_index: dict[tuple[tuple[str, int], ...], int] = {}
        for number, coordinates in zip(numbers, self.all_coordinates):
            key = tuple((name, index) for name, index in coordinates.items() if name != axis)
            if by_index.setdefault(key, number) != number:
                return False
        return True

    def _gathered(self, numbers: Sequence[int]) -> list[int]:
        return [
            self.expressions.on_member(number, coordinates)
            for number, coordinates in zip(numbers, self.all_coordinates)
        ]

    # --- calls ---

    def all_reduce(self, attributes: Mapping[str, Any], operands: Sequence[Sequence[int]]) -> Results:
        how = attributes.get("reduce", "sum")
        results = [self.reduced(row, how) for row in zip(*operands)]
        return [results] * len(operands)

    def reduce(self, attributes: Mapping[str, Any], operands: Sequence[Sequence[int]]) -> Results:
        results = self.all_reduce(attributes, operands)
        return [result if index == attributes["root"] else None for index, result in enumerate(results)]

    def broadcast(self, attributes: Mapping[str, Any], operands: Sequence[Sequence[int]]) -> Results:
        root = attributes["root"]
        results = [self.expressions.on_member(number, self.all_coordinates[root]) for number in operands[root]]
        return [results] * len(operands)

    def reduce_scatter(self, attributes: Mapping[str, Any], operands: Sequence[Sequence[int]]) -> Results:
        (whole, *_) = self.all_reduce(attributes, operands)
        assert whole is not None
        if "axis" in attributes:
            return [
                [self._part(whole[0], attributes["axis"], attributes["sizes"], index)] for index in range(len(operands))
            ]
        bucket = self.expressions.flat(piece for number in whole for piece in self.expressions.pieces(number))
        return [[self.expressions.flat(pieces)] for pieces in self.expressions.split(bucket, attributes["cuts"])]

    def all_gather(self, attributes: Mapping[str, Any], operands: Sequence[Sequence[int]]) -> Results:
        if "axis" in attributes:
            return self._joined(attributes, [numbers[0] for numbers in operands])
        members = self._gathered([numbers[0] for numbers in operands])
        bucket = self.expressions.flat(piece for number in members for piece in self.expressions.pieces(number))
        shapes = parse_shapes(attributes["shapes"])
        parts = self.expressions.split(bucket, [0, *accumulate(prod(shape) for shape in shapes)])
        results = [self.expressions.view(self.expressions.flat(part), shape) for part, shape in zip(parts, shapes)]
        return [results] * len(operands)

    def _joined(self, attributes: Mapping[str, Any], numbers: Sequence[int]) -> Results:
        """The slices of all members along an axis."""
        axis, sizes = attributes["axis"], tuple(attributes["sizes"])
        shape = self.expressions.shape(numbers[0])
        if len(set(numbers)) == 1 and self.expressions.varies[numbers[0]].issuperset(self.axes):
            whole = None if shape is None else (*shape[:axis], sum(sizes), *shape[axis + 1 :])
            result = self.expressions.over_members("gathered", (self.axes, axis), numbers[0], self.axes, whole)
        else:
            result = self.expressions.concatenated(self._gathered(numbers), axis)
        return [[result]] * len(numbers)

    def all_to_all(self, attributes: Mapping[str, Any], operands: Sequence[Sequence[int]]) -> Results:
        numbers = self._gathered([numbers[0] for numbers in operands])
        axis, sizes = attributes["split_axis"], attributes["split_sizes"]
        rows = [[self._part(number, axis, sizes, index) for number in numbers] for index in range(len(numbers))]
        return [[self.expressions.concatenated(row, attributes["concat_axis"])] for row in rows]

    def _part(self, number: int, axis: int, sizes: Sequence[int], index: int) -> int:
        """A member's part of an axis."""
        start = sum(sizes[:index])
        rank = len(self.expressions.shape(number) or ())
        runs = ((start, start + sizes[index]),) if sizes[index] else ()
        return self.expressions.take(number, along(axis, runs, rank))


_RULES = {
    "AllReduce": Members.all_reduce,
    "Reduce": Members.reduce,
    "Broadcast": Members.broadcast,
    "ReduceScatter": Members.reduce_scatter,
    "AllGather": Members.all_gather,
    "AllToAll": Members.all_to_all,
}
