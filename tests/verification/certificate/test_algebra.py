"""Nested loops against positions that are written out, and equal values against numbers."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product
from math import prod

import pytest

from gopt.verification.certificate.algebra import Algebra, WrongLine, leaves, merged
from gopt.verification.certificate.algebra import ExpressionLine as Line


def positions(at: int, loops) -> list[int]:
    return [at + sum(index * step for index, (_, step) in zip(places, loops))
            for places in product(*(range(size) for size, _ in loops))]  # fmt: skip


def elements(algebra: Algebra, stretches) -> list[tuple[int, int]]:
    """Each element as an expression and a position; all stretches are single elements."""
    result = []
    for length, terms in stretches:
        ((of, at, loops),) = leaves(terms)
        result += [(of, place) for place in positions(at, loops or ((length, 0),))]
    return result


@pytest.mark.parametrize("seed", range(60))
def test_places_of_drawn_loops_are_those_written_out(seed):
    """A leaf, seen through loops drawn at random, three times."""
    draw = random.Random(seed)
    algebra = Algebra({})
    sizes = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
    algebra.forms = [Line("one", (), (), ()), Line("leaf", "x", (), sizes)]
    algebra.varies, algebra.finite = [frozenset(), frozenset()], [True, True]
    value, due = algebra.stretches(1), [(1, place) for place in range(prod(sizes))]
    for _ in range(3):
        count = len(due)
        loops, at = [], draw.randrange(count)
        left = count - 1 - at
        for _ in range(draw.randint(1, 3)):
            step = draw.choice([0, *range(1, max(2, left + 1))])
            size = draw.randint(1, min(4, left // step + 1 if step else 3))
            loops.append((size, step))
            left -= (size - 1) * step
        value = algebra.places(value, at, tuple(loops))
        due = [due[place] for place in positions(at, loops)]
        assert elements(algebra, value) == due
        assert sum(length for length, _ in value) == len(due)


def test_loops_are_merged():
    assert merged([(2, 12), (3, 4), (1, 9), (4, 1)]) == ((24, 1),)
    assert merged([(2, 0), (3, 0)]) == ()
    assert merged([(2, 0), (3, 1)]) == ((2, 0), (3, 1))


def table(*forms: Line) -> Algebra:
    algebra = Algebra({"shard": 2})
    algebra.forms = [Line("one", (), (), ()), *forms]
    algebra.finite = [True] * len(algebra.forms)
    algebra.varies = [frozenset({"shard"}) if form.op == "batch" else frozenset() for form in algebra.forms]
    for number, form in enumerate(algebra.forms):
        algebra.varies[number] = algebra.varies[number].union(*(algebra.varies[of] for of in form.operands))
    return algebra


def test_sums_of_ranges_are_joined():
    algebra = table(
        Line("state", "x", (), (20,)), Line("total", ((0, 13),), (1,), ()), Line("total", ((13, 20),), (1,), ()),
        Line("linear", (1, 1), (2, 3), ()), Line("total", (), (1,), ()), Line("linear", (1, 2), (2, 3), ()),
    )  # fmt: skip
    assert algebra.same(4, 5)
    assert not algebra.same(6, 5)


def test_a_sum_over_members_leaves_common_factors_in_front():
    algebra = table(
        Line("batch", "x", (), (4,)), Line("state", "w", (), (4,)), Line("product", (1, 1), (1, 2), (4,)),
        Line("reduced", ("sum", frozenset({"shard"})), (3,), (4,)),
        Line("reduced", ("sum", frozenset({"shard"})), (1,), (4,)), Line("product", (1, 1), (2, 5), (4,)),
        Line("reduced", ("sum", frozenset({"shard"})), (2,), (4,)), Line("linear", (2,), (2,), (4,)),
    )  # fmt: skip
    assert algebra.same(4, 6)
    assert algebra.same(7, 8), "a value that all members have, twice"
    assert not algebra.same(4, 5)


def test_what_may_be_no_number_does_not_vanish():
    algebra = table(Line("state", "x", (), (4,)), Line("inverse", None, (1,), (4,)))
    (_, terms), (_, plain) = algebra.stretches(2)[0], algebra.stretches(1)[0]
    assert algebra.added([(plain, 1), (plain, -1)]) == ()
    assert algebra.added([(terms, 1), (terms, -1)]) == ((terms[0][0], Fraction(0)),)


def test_an_element_that_is_not_there_is_wrong():
    algebra = table(Line("state", "x", (), (4,)), Line("flat", ((2, 5),), (1,), (3,)))
    with pytest.raises(WrongLine):
        algebra.stretches(2)
