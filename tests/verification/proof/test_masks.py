"""Masked choices: a mask and indices into a part are told from any that select or count otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.ranges import applied


def masked(
    size: int, start: int, stop: int, *, negative: bool = True, shift: int = 0, count: int = 0, outside: int = 0
) -> tuple[ConstantTable, int, int, int]:
    """The table, the indices, the mask and the places in a part, as gopt writes them; the rest: what is wrong."""
    e = Expressions({})
    table = ConstantTable(e)

    def number(value: int) -> int:
        return e.from_array(np.array(value, np.int64))

    def op(name: str, *operands: int) -> int:
        return applied(e, name, (), operands)

    index = e.leaf("batch", "ids", (4, 5))
    place = op("Where", op("Less", index, number(0)), op("Add", index, number(size)), index) if negative else index
    own = op("Sub", place, number(start + shift))
    below = op("Less", own, number(stop - start + count))
    inside = op("And", below, op("Not", op("Less", own, number(0))))
    return table, index, inside, op("Where", inside, own, number(outside))


@pytest.mark.parametrize(("size", "start", "stop"), [(7, 0, 3), (7, 3, 7), (1000, 250, 500), (2, 1, 2)])
def test_the_rows_of_a_part_are_told(size: int, start: int, stop: int) -> None:
    for outside in (0, stop - start - 1):
        table, index, inside, safe = masked(size, start, stop, outside=outside)
        assert table.masks.chosen(inside, safe, size) == (index, ((start, stop),))


@pytest.mark.parametrize(
    "wrong", [{"negative": False}, {"shift": 1}, {"shift": -1}], ids=["negative numbers", "late", "early"]
)
def test_other_rows_are_not_those_of_the_part(wrong: dict[str, int]) -> None:
    table, index, inside, safe = masked(8, 3, 6, **wrong)
    assert table.masks.chosen(inside, safe, 8) != (index, ((3, 6),))


def test_a_mask_of_more_rows_selects_more_rows() -> None:
    table, index, inside, safe = masked(8, 3, 6, count=1)
    assert table.masks.chosen(inside, safe, 8) == (index, ((3, 7),))


def test_places_that_count_otherwise_are_refused() -> None:
    table, _, inside, _ = masked(8, 3, 6)
    e = table.expressions
    index = e.leaf("batch", "ids", (4, 5))
    assert table.masks.chosen(inside, index, 8) is None, "the part begins at 0"
    other = applied(e, "Sub", (), [e.leaf("batch", "others", (4, 5)), e.from_array(np.array(3, np.int64))])
    assert table.masks.chosen(inside, other, 8) is None, "the mask is of other indices"
