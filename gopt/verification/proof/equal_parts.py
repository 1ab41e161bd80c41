"""Elementwise nodes on equal parts of values: the same part of the results on whole values.

A part is ranges of elements in a row, or ranges of dimensions. The results on whole values are read once; members have
further parts of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeGuard, cast

from gopt.verification.proof.boxes import Boxes
from gopt.verification.proof.forms import FLAT, Shape
from gopt.verification.proof.selections import Runs, Selection

Column = tuple[int, ...]
"""The operands of a node on a range."""
Row = tuple[int, ...] | int
"""The values of an operand, range by range; or a value of one element."""


class Region(NamedTuple):
    """Ranges of elements of values in a row; or, with the shape of the ``whole``, ranges of dimensions of a value."""

    ranges: Runs | Selection
    whole: Shape
    shape: Shape

    def of(self, expressions: Boxes, wholes: Sequence[int]) -> int:
        """The part of other values."""
        if self.whole is not None:
            return expressions.take(wholes[0], cast(Selection, self.ranges))
        return expressions.flat((number, *run) for number, run in zip(wholes, cast(Runs, self.ranges)))


def common_region(expressions: Boxes, operands: Iterable[int]) -> tuple[Region, list[Row]] | None:
    """The common region of the ranged operands of a node, and the values around each operand: the number of a value of
    one element stays. None for operands with other places."""
    region, rows, rank = None, list[Row](), 0
    for number in operands:
        op, ranges, values, shape = expressions.all[number]
        if not expressions.ranged(number):
            if expressions.elements(number) != 1:
                return None
            rank = max(rank, len(shape or ()))
            rows.append(number)
            continue
        part: tuple[object, Shape, Shape] = ranges, None, shape
        if op != FLAT:
            box = expressions.box(number)
            if box is None or any(runs is not None and size == 1 for runs, size in zip(box[1], shape or ())):
                return None  # a dimension of length 1 may belong to a value that does not follow the dimension
            part, values = (box[1], expressions.shape(box[0]), shape), box[:1]
        if region is not None and region != part:
            return None
        region = part
        rows.append(values)
    if region is None or rank > len(region[2] or ()):
        return None
    return Region(*cast(tuple[Runs, Shape, Shape], region)), rows


def columns_of(rows: Sequence[Row]) -> list[Column]:
    """The values of each range, beside the values of one element."""
    count = next(map(len, filter(is_row, rows)))
    return list(zip(*(row if is_row(row) else (row,) * count for row in rows)))


def is_row(row: Row) -> TypeGuard[Column]:
    """Return whether an operand has ranges."""
    return isinstance(row, tuple)
