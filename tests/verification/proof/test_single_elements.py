"""Laws of values of one element: single elements of values, numbers in all elements of a value, and sums of one size in
two shapes. Each law has a neighbour that is wrong; test_expressions.py checks all of them by drawn numbers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gopt.verification.proof.calls import Members
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import LARGEST

COLUMN = (((2, 3),), None)
ROW = (None, ((2, 3),))


@pytest.fixture
def e() -> Expressions:
    return Expressions({"tp": 2})


def test_a_sum_of_terms_in_two_shapes_is_the_sum_of_both(e):
    state, gradient = e.leaf("state", "s", (3,)), e.leaf("batch", "g", (1, 3))
    term = e.view(e.scaled(gradient, Fraction(1, 100)), (3,))
    both = e.elementwise(e.added, [state, term])
    due = e.added([e.total(state), e.scaled(e.total(gradient), Fraction(1, 100))])
    assert e.total(both) == due == e.total(e.view(both, (3, 1)))
    assert e.total(e.added([state, e.leaf("batch", "r", (3, 1))])) != due


def test_a_multiple_under_a_view_is_a_multiple_in_sums_and_products(e):
    x, y = e.leaf("batch", "x", (1, 4)), e.leaf("state", "y", (4,))
    half = e.view(e.scaled(x, Fraction(1, 2)), (4,))
    for make, times in ((e.added, 2), (lambda values: e.product(values, (1, 1)), Fraction(1, 2))):
        one, other = make([half, y]), make([e.view(x, (4,)), e.scaled(y, times) if times == 2 else y])
        assert e.scaled(one, times) == other if times == 2 else one == e.scaled(other, times)
    assert e.added([half, y]) != e.added([e.view(x, (4,)), y])


def test_elements_that_all_have_one_number_are_no_part(e):
    """A number that is spread and cut is the number beside the elements of any part."""
    x, y, s = e.leaf("state", "x", (8,)), e.leaf("state", "y", (8,)), e.leaf("batch", "s", (1,))

    def power(values):
        return e.apply("Pow", (), values, (8,) if (8,) in map(e.shape, values) else (4,))

    spread = e.linear({s: 1}, (8,))
    quotient = e.elementwise(lambda values: e.product(values, (1, 1, -1)), [x, y, spread])
    root = e.elementwise(power, [x, spread])
    assert e.view(spread, (2, 4)) == e.linear({s: 1}, (2, 4))
    e.seal()
    for half in (((0, 4),), ((4, 8),)):
        parts = [e.take(value, (half,)) for value in (x, y, spread)]
        found = e.elementwise(lambda values: e.product(values, (1, 1, -1)), parts)
        assert found == e.take(quotient, (half,))
        assert e.elementwise(power, [parts[0], parts[2]]) == e.take(root, (half,)) != found
    assert e.flat([(spread, 0, 3), (s, 0, 1)]) == e.linear({s: 1}, (4,))
    assert e.flat([(spread, 0, 3), (x, 0, 1)]) != e.linear({s: 1}, (4,))


def test_an_element_times_a_number_is_an_element_of_the_multiple(e):
    """Two losses in a row, each by a weight of its own: a rank has one of the weights, and the loss."""
    x, s, t = e.leaf("state", "x", (2,)), e.leaf("batch", "s", ()), e.leaf("batch", "t", ())
    row = e.concatenated([e.view(s, (1,)), e.view(t, (1,))], 0)

    def times(values):
        return e.elementwise(lambda pair: e.product(pair, (1, 1)), values)

    whole = times([x, row])
    e.seal()
    for at, number in enumerate((s, t)):
        part = e.take(x, (((at, at + 1),),))
        assert times([part, e.view(number, (1,))]) == e.take(whole, (((at, at + 1),),))
        assert times([part, e.view((t, s)[at], (1,))]) != e.take(whole, (((at, at + 1),),))


def test_an_element_of_the_terms_of_all_ranks_is_an_element_of_the_sum(e):
    """Each rank of a group has some terms, of a part with a single row."""
    x, y = e.leaf("state", "x", (3, 4)), e.leaf("state", "y", (3, 1))
    whole = e.summed(x, (1,))
    e.seal()
    parts = [e.summed(e.take(x, (None, ends)), (1,)) for ends in (((0, 1),), ((1, 4),))]
    for at in range(3):
        rows = [e.view(e.flat([(part, at, at + 1)]), (1, 1)) for part in parts]
        element = e.view(e.flat([(whole, at, at + 1)]), (1, 1))
        assert e.sum_of(rows) == element == e.sum_of(rows[::-1])
        assert e.sum_of([rows[0], e.view(e.flat([(parts[1], (at + 1) % 3, (at + 1) % 3 + 1)]), (1, 1))]) != element
        assert element not in (e.sum_of([rows[0], rows[0]]), e.sum_of([*rows, rows[1]]))
        beside = e.view(e.flat([(y, at, at + 1)]), (1, 1))
        assert e.sum_of([*rows, beside]) == e.sum_of([element, beside]) != element


def test_rows_that_are_one_element_again_and_again_are_summed_row_by_row(e):
    """The sum of all such rows once stood for each of them."""
    x = e.leaf("state", "x", (3, 1))
    first = e.flat([(x, 0, 1)])
    e.seal()
    rows = e.view(e.flat([(x, 0, 1), (x, 0, 1)]), (2, 1))
    assert e.summed(rows, (1,)) == rows == e.summed(rows, ())
    assert e.summed(rows, (0, 1)) != e.view(first, (1, 1)) != e.summed(rows, (0,))


def test_a_sum_of_one_element_is_the_element(e):
    x, y = e.leaf("state", "x", (3,)), e.apply("Sqrt", (), [e.leaf("state", "y", (3,))], (3,))
    for value in (x, y, e.added([x, y])):
        parts = [e.total(e.flat(e.cut(value, *span))) for span in ((0, 2), (2, 3))]
        element = e.view(e.flat([(value, 2, 3)]), ())
        assert parts[1] == element
        places = [{"tp": 0}, {"tp": 1}]
        rows = [e.view(part, (1,)) for part in parts]
        assert e.view(Members(e, ["tp"], places).reduced(rows, "sum"), ()) == e.total(value)
        assert Members(e, ["tp"], places).reduced([rows[0], e.view(rows[0], (1,))], "sum") != e.view(
            e.total(value), (1,)
        )
        assert e.added([e.total(value), parts[0]], (1, -1)) == element or not e.finite[value]


def test_a_single_element_of_two_values_is_one_along_the_dimension_of_both(e):
    """Elements of a column and of a row, of shape [1, 1]: of the product of both in one dimension."""
    column, row = e.leaf("state", "c", (3, 1)), e.leaf("state", "r", (1, 3))
    whole = e.elementwise(lambda values: e.product(values, (1, 2)), [column, e.view(row, (3, 1))])
    e.seal()
    parts = [e.take(column, COLUMN), e.take(row, ROW)]
    found = e.elementwise(lambda values: e.product(values, (1, 2)), parts)
    assert e.alike(found, e.take(whole, COLUMN))
    assert not e.alike(found, e.take(whole, (((1, 2),), None)))


def softmax(e, value, subtracted):
    """exp(x - m) / sum(exp(x - m)) over all elements."""
    power = e.exp(e.elementwise(lambda values: e.added(values, (1, -1)), [value, subtracted]))
    return e.elementwise(lambda values: e.product(values, (1, -1)), [power, e.total(power)])


def test_a_softmax_of_a_multiple_over_all_elements_is_one_for_its_own_maximum(e):
    x, y = (e.scaled(e.leaf("state", name, (4, 1)), Fraction(333, 2000)) for name in "xy")
    due = e.elementwise(lambda values: e.product(values, (1, -1)), [e.exp(x), e.total(e.exp(x))])
    assert softmax(e, x, e.extreme(LARGEST, [x])) == due
    unknown = e.apply("Log", (), [e.leaf("batch", "m", ())], ())
    assert softmax(e, x, e.extreme(LARGEST, [y])) == due, "states are numbers"
    assert softmax(e, x, unknown) != due, "may be no number"


def test_an_exponential_of_a_multiple_has_a_sign(e):
    x, y = e.leaf("state", "x", (4,)), e.leaf("state", "y", (4,))
    half = Fraction(1, 2)
    one = e.exp(e.linear({x: half, y: -half, e.constant(0): 1}, (4,)))
    assert one == e.product([e.exp(e.scaled(x, half)), e.exp(e.scaled(y, half))], (1, -1))
    assert one != e.product([e.exp(e.scaled(x, half)), e.exp(e.scaled(y, half))], (1, 1))
    assert one != e.exp(e.linear({x: 1, y: -1}, (4,)))
