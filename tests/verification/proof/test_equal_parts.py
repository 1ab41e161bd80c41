"""Operands that are the same part of their values have one region; the region of other values is the same part."""

from __future__ import annotations

from gopt.verification.proof.equal_parts import columns_of, common_region
from gopt.verification.proof.exponentials import Expressions

ROWS = ((0, 2), (4, 6)), None
COLUMNS = None, ((2, 5),)


def values() -> tuple[Expressions, list[int]]:
    """Three values of 8 x 6 elements."""
    expressions = Expressions({})
    numbers = [expressions.leaf("state", name, (8, 6)) for name in "abc"]
    expressions.seal()
    return expressions, numbers


def test_ranges_of_dimensions_are_one_region() -> None:
    expressions, (a, b, c) = values()
    for selection in (ROWS, COLUMNS):
        parts = [expressions.take(number, selection) for number in (a, b)]
        region, rows = common_region(expressions, [parts[0], expressions.constant(3), parts[1]]) or (None, [])
        assert region is not None
        assert columns_of(rows) == [(a, expressions.constant(3), b)]
        assert region.of(expressions, [c]) == expressions.take(c, selection)


def test_ranges_of_elements_stand_in_a_row() -> None:
    expressions, (a, b, c) = values()
    rows = [expressions.flat([(first, 3, 9), (second, 0, 5)]) for first, second in ((a, b), (b, c))]
    region, operands = common_region(expressions, rows) or (None, [])
    assert region is not None
    assert columns_of(operands) == [(a, b), (b, c)]
    assert region.of(expressions, [c, a]) == expressions.flat([(c, 3, 9), (a, 0, 5)])


def test_other_parts_and_whole_values_have_no_common_region() -> None:
    expressions, (a, b, _) = values()
    part, single = expressions.take(a, COLUMNS), (None, ((2, 3),))
    for second in (
        b,  # broadcast, or a part of another size
        expressions.take(b, (None, ((3, 6),))),
        expressions.take(expressions.leaf("state", "d", (8, 7)), COLUMNS),
        expressions.constant(1, (8, 3)),
        expressions.leaf("state", "e", (1, 1, 1)),
    ):
        assert common_region(expressions, [part, second]) is None
    assert common_region(expressions, [expressions.take(number, single) for number in (a, b)]) is None


def test_values_that_differ_in_lengths_of_one_have_a_region_in_their_common_shape() -> None:
    """A gradient of one sample keeps the dimension of samples, beside moments without it."""
    expressions, (a, *_) = values()
    gradient = expressions.take(expressions.leaf("state", "of a sample", (1, 8, 6)), (None, *COLUMNS))
    part, rate = expressions.take(a, COLUMNS), expressions.leaf("input", "rate", ())
    shaped = expressions.in_common_shape([gradient, rate, part])
    assert shaped == [expressions.view(gradient, (8, 3)), rate, part]
    region, rows = common_region(expressions, shaped) or (None, [])
    assert region is not None
    assert columns_of(rows) == [(expressions.view(expressions.all[gradient].operands[0], (8, 6)), rate, a)]


def test_values_of_other_sizes_stay_in_their_shapes() -> None:
    expressions, (a, *_) = values()
    other = expressions.leaf("state", "d", (8, 7))
    assert expressions.in_common_shape([a, other]) == [a, other]
