"""Expressions that are equal have equal values, others have not."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from gopt.runtime import capacity
from gopt.verification.certificate.values import ExpressionLine as Line
from gopt.verification.certificate.values import PointValues, WrongLine, simplest


def table(*forms: Line) -> PointValues:
    values = PointValues({"shard": 2}, "seed")
    values.opset = 20
    values.forms = [Line("one", (), (), ()), *forms]
    values.varies = [frozenset({"shard"}) if form.op == "batch" else frozenset() for form in values.forms]
    return values


def equal(values: PointValues, one: int, two: int) -> bool:
    return bool(np.all(values.value(one) == values.value(two)))


def test_sums_of_ranges_are_joined():
    values = table(
        Line("state", "x", (), (20,)), Line("total", ((0, 13),), (1,), ()), Line("total", ((13, 20),), (1,), ()),
        Line("linear", (1, 1), (2, 3), ()), Line("total", (), (1,), ()), Line("linear", (1, 2), (2, 3), ()),
    )  # fmt: skip
    assert equal(values, 4, 5)
    assert not equal(values, 6, 5)


def test_a_sum_over_members_leaves_common_factors_in_front():
    values = table(
        Line("batch", "x", (), (4,)), Line("state", "w", (), (4,)), Line("product", (1, 1), (1, 2), (4,)),
        Line("reduced", ("sum", frozenset({"shard"})), (3,), (4,)),
        Line("reduced", ("sum", frozenset({"shard"})), (1,), (4,)), Line("product", (1, 1), (2, 5), (4,)),
        Line("reduced", ("sum", frozenset({"shard"})), (2,), (4,)), Line("linear", (2,), (2,), (4,)),
    )  # fmt: skip
    assert equal(values, 4, 6)
    assert equal(values, 7, 8), "a value that all members have, twice"
    assert not equal(values, 4, 5)


def test_the_terms_of_a_product_of_matrices_add_up():
    def some(start: int, stop: int) -> Line:
        return Line("parted", (3, (((1, 0), 6, ((start, stop),)),)), (3,), (4, 5))

    values = table(
        Line("batch", "x", (), (4, 6)), Line("state", "w", (), (6, 5)), Line("MatMul", ((), 0), (1, 2), (4, 5)),
        some(0, 2), some(2, 6), some(3, 6), Line("linear", (1, 1), (4, 5), (4, 5)),
        Line("linear", (1, 1), (4, 6), (4, 5)), Line("take", (None, ((0, 2),)), (1,), (4, 2)),
        Line("take", (((0, 2),), None), (2,), (2, 5)), Line("MatMul", ((), 0), (9, 10), (4, 5)),
    )  # fmt: skip
    assert equal(values, 3, 7) and equal(values, 4, 11)
    assert not equal(values, 3, 8)


def test_an_operator_without_laws_acts_row_by_row():
    values = table(
        Line("state", "x", (), (4, 6)), Line("LpNormalization", ((("axis", -1),), 0), (1,), (4, 6)),
        Line("take", (((1, 3),), None), (1,), (2, 6)), Line("LpNormalization", ((("axis", -1),), 0), (3,), (2, 6)),
        Line("take", (((1, 3),), None), (2,), (2, 6)), Line("LpNormalization", ((("axis", 0),), 0), (3,), (2, 6)),
    )  # fmt: skip
    assert equal(values, 4, 5)
    assert not equal(values, 6, 5)


def test_a_choice_is_a_sum_of_a_term_for_each_outcome():
    total, choice = ("sum", frozenset({"shard"})), ("Where", ())
    values = table(
        Line("batch", "x", (), (4,)), Line("state", "r", (), (4,)), Line("state", "c", (), ()),
        Line(*choice, (3, 1, 2), (4,)), Line("reduced", total, (4,), (4,)), Line("reduced", total, (1,), (4,)),
        Line("linear", (2,), (2,), (4,)), Line(*choice, (3, 6, 7), (4,)), Line(*choice, (3, 6, 2), (4,)),
        Line(*choice, (3, 7, 6), (4,)), Line("linear", (), (), (4,)), Line(*choice, (3, 6, 11), (4,)),
        Line(*choice, (3, 11, 7), (4,)), Line("linear", (1, 1), (12, 13), (4,)),
        Line("linear", (1, -1), (6, 7), (4,)), Line(*choice, (3, 15, 11), (4,)), Line("linear", (1, 1), (7, 16), (4,)),
    )  # fmt: skip
    assert equal(values, 5, 8) and equal(values, 14, 8)
    assert not equal(values, 5, 9) and not equal(values, 10, 8), "what is kept once, and the other outcome"
    assert not equal(values, 17, 8), "what may be no number is read for one outcome alone"


def test_stored_whole_numbers_are_added_up():
    def stored(value: int, dtype: str = "int64") -> Line:
        return Line("constant", (dtype, np.array(value, dtype).tobytes()), (), ())

    values = table(
        stored(5), stored(10), stored(-5), Line("linear", (2,), (1,), ()), Line("linear", (1, 1), (1, 3), ()),
        stored(0), stored(5, "uint8"),
    )  # fmt: skip
    assert equal(values, 4, 2) and equal(values, 5, 6) and not equal(values, 1, 2) and not equal(values, 7, 1)


def test_exponentials_of_sums_are_products():
    values = table(
        Line("state", "x", (), (4,)), Line("state", "y", (), (4,)), Line("linear", (1, -2), (1, 2), (4,)),
        Line("Exp", (), (1,), (4,)), Line("Exp", (), (2,), (4,)), Line("product", (1, -2), (4, 5), (4,)),
        Line("Exp", (), (3,), (4,)), Line("Log", (), (7,), (4,)), Line("Log", (), (6,), (4,)),
        Line("product", (1, 2), (4, 5), (4,)),
    )  # fmt: skip
    assert equal(values, 6, 7) and equal(values, 9, 3)
    assert not equal(values, 10, 7)


def test_the_largest_of_elements_is_of_a_set():
    values = table(
        Line("batch", "x", (), (3, 4)), Line("ReduceMax", ((("axes", (-1,)),), 0), (1,), (3, 1)),
        Line("largest", ((),), (2,), ()), Line("largest", ((),), (1,), ()), Line("largest", (((0, 11),),), (1,), ()),
        Line("reduced", ("largest", frozenset({"shard"})), (3,), ()),
        Line("reduced", ("largest", frozenset({"shard"})), (1,), (3, 4)), Line("largest", ((),), (7,), ()),
    )  # fmt: skip
    values.opset = 13
    assert equal(values, 3, 4) and equal(values, 6, 8)
    assert not equal(values, 5, 4) and not equal(values, 6, 3)


def test_what_is_rounded_stays():
    values = table(
        Line("state", "x", (), (4,)), Line("round", "float16", (1,), (4,)), Line("round", "float16", (2,), (4,)),
        Line("linear", (Fraction(1, 3),), (0,), ()), Line("round", "float16", (4,), ()),
        Line("linear", (simplest(np.float16(1 / 3)),), (0,), ()), Line("round", "bfloat16", (2,), (4,)),
    )  # fmt: skip
    assert equal(values, 3, 2) and equal(values, 5, 6)
    assert not equal(values, 2, 1) and not equal(values, 7, 2)


def test_an_element_that_is_not_there_is_wrong():
    values = table(Line("state", "x", (), (4,)), Line("flat", ((2, 5),), (1,), (3,)))
    with pytest.raises(IndexError):
        values.value(2)


def test_another_shape_is_wrong():
    values = table(Line("state", "x", (), (4,)), Line("linear", (2,), (1,), (3,)), Line("permuted", (0,), (1,), (5,)))
    for number in (2, 3):
        with pytest.raises((WrongLine, ValueError)):
            values.value(number)


@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 25, 1 << 25)])
def test_a_value_larger_than_memory_is_told_before_it_is_made(shape):
    values = table(Line("linear", (1,), (0,), shape), Line("state", "x", (), shape), Line("total", (), (2,), ()))
    for number in (1, 2, 3):
        with pytest.raises(MemoryError, match=str(shape[0])):
            values.value(number)


def test_a_value_of_many_members_is_as_large_as_all_of_them(monkeypatch):
    monkeypatch.setattr(capacity, "free_memory", lambda: 100 << 20)
    values = table(Line("batch", "x", (), (1 << 20,)), Line("state", "w", (), (1 << 20,)))
    values.fits(2)
    with pytest.raises(MemoryError):
        values.fits(1)


@pytest.mark.parametrize("seed", range(40))
def test_rows_at_constant_places_are_written_and_added(seed: int) -> None:
    draw = np.random.default_rng(seed)
    (size, width, count), how = map(int, draw.integers([2, 1, 1], [6, 4, 6])), ("none", "add")[seed % 2]
    index = draw.permutation(size)[:count] if how == "none" else draw.integers(-size, size, count)
    values = table(
        Line("batch", "x", (), (size, width)), Line("state", "y", (), (len(index), width)),
        Line("constant", "i", (), (len(index), 1)),
        Line("ScatterND", ((("reduction", how),), 0), (1, 3, 2), (size, width)),
    )  # fmt: skip
    values.arrays[3] = index[:, None]
    due = values.value(1).copy()
    for place, row in zip(index, np.moveaxis(values.value(2), 1, 0)):
        due[:, place] = values.plus(due[:, place], row) if how == "add" else row
    assert (values.value(4) == due).all()
    other = PointValues(values.extents, "seed")
    other.forms, other.varies, other.opset, other.arrays = values.forms, values.varies, 20, {3: index[::-1, None]}
    assert (other.value(4) == due).all() == (index % size == index[::-1] % size).all()


def test_places_written_twice_are_no_values_in_order() -> None:
    values = table(
        Line("state", "x", (), (3,)), Line("state", "y", (), (2,)), Line("constant", "i", (), (2, 1)),
        Line("ScatterND", ((), 0), (1, 3, 2), (3,)),
    )  # fmt: skip
    values.arrays[3] = np.array([[1], [1]])
    assert not np.isin(values.value(4), np.concatenate([values.value(1), values.value(2)], -1)).any()


@pytest.mark.parametrize("beside", [(), (3,), (4,)])
@pytest.mark.parametrize("pads", [(0, 1, 2, 0), (1, 0, 0, 0), (0, 0, 0, 0)])
def test_places_of_a_padded_value_are_the_value_between_borders(pads, beside) -> None:
    sizes = 2 + pads[0] + pads[2], 3 + pads[1] + pads[3]
    values = table(
        Line("batch", "x", (), (2, 3)), Line("constant", "p", (), (4,)), Line("linear", (), (), ()),
        Line("linear", (2,), (0,), ()), Line("Pad", ((), 0), (1, 2, *beside), sizes),
    )  # fmt: skip
    values.arrays[2] = np.array(pads)
    due = np.full((2, *sizes), values.element(2 * (beside == (4,))))
    due[:, pads[0] : pads[0] + 2, pads[1] : pads[1] + 3] = values.value(1)
    assert (values.value(5) == due).all()


def test_a_value_padded_by_less_than_nothing_or_by_other_places_is_unknown() -> None:
    for mode, pads in (("constant", [-1, 0]), ("reflect", [1, 0])):
        values = table(
            Line("state", "x", (), (3,)), Line("constant", "p", (), (2,)),
            Line("Pad", ((("mode", mode),), 0), (1, 2), (3 + sum(pads),)),
        )  # fmt: skip
        values.arrays[2] = np.array(pads)
        assert not np.isin(values.value(3), values.value(1)).any()
