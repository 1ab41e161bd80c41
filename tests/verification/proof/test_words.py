"""Texts of expressions: constants with their values, and two that differ never look alike."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.verification.proof.constants import ConstantTable
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.forms import INITIAL, STATE
from gopt.verification.proof.words import Words


@pytest.fixture
def expressions() -> Expressions:
    return Expressions({"dp": 2, "shard": 3})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array(7), "7"),
        (np.array(True), "True"),
        (np.array([1, 2]), "[1, 2]"),
        (np.arange(9), "[0, 1, 2, …] of shape [9]"),
        (np.array([[0.5, 1.5], [2.5, 3]], np.float32), "[0.5, 1.5, 2.5, …] of shape [2, 2]"),
        (np.array(0.25, np.float32), "1/4"),
    ],
)
def test_a_constant_has_its_value(value, text, expressions):
    number = expressions.from_array(value)
    assert Words(expressions, {}, expressions.values).text(number, top=True) == text


def test_a_filled_value_is_named(expressions):
    table = ConstantTable(expressions)
    number = table.filled(np.array([3], np.int64), (1 << 20,))
    assert Words(expressions, {}, expressions.values).text(number) == "3 in each element of [1048576]"


def alike(expressions: Expressions, table: ConstantTable) -> dict[str, tuple[int, int]]:
    """Pairs that differ where a short text ends."""
    x, y = (expressions.leaf(STATE, name, (4,)) for name in "xy")

    def inside(number: int, times: int) -> int:
        for _ in range(times):
            number = expressions.apply("Tanh", (), [number], (4,))
        return number

    def several(last: int) -> int:
        return expressions.apply("Concat", (("axis", 0),), [x, x, x, x, last], (20,))

    long = [np.arange(3000), np.arange(3000)]
    long[1][2500] = -1
    return {
        "deep": (inside(x, 9), inside(y, 9)),
        "late operands": (several(x), several(y)),
        "attributes": tuple(expressions.apply("Slice", (("axis", axis),), [x], (4,)) for axis in (0, 1)),  # type: ignore[dict-item]
        "kinds of leaves": (x, expressions.leaf(INITIAL, "x", (4,))),
        "late elements": (expressions.from_array(long[0]), table.expressions.from_array(long[1])),
        "shapes": (expressions.leaf("draw", "n", (4,)), expressions.leaf("draw", "n", (2,))),
        "terms": tuple(
            expressions.linear({**{inside(x, 1 + n): 1 for n in range(6)}, inside(x, 9): factor}, (4,))
            for factor in (2, 3)
        ),  # type: ignore[dict-item]
    }


@pytest.mark.parametrize(
    "kind", ["deep", "late operands", "attributes", "kinds of leaves", "late elements", "shapes", "terms"]
)
def test_texts_of_two_expressions_part(kind, expressions):
    table = ConstantTable(expressions)
    pair = alike(expressions, table)[kind]
    words = Words(expressions, {}, expressions.values)
    assert words.text(pair[0], top=True) == words.text(pair[1], top=True), "the short texts are alike"
    texts = words.pair(*pair)
    assert texts[0] != texts[1] and max(map(len, texts)) < 4000
    assert words.text(pair[0], top=True) == words.text(pair[1], top=True), "and so they are behind it"
    if kind == "late elements":
        assert texts[0].endswith("element 2500: 2500") and texts[1].endswith("element 2500: -1")


def test_a_value_that_should_be_the_same_on_all_ranks_is_told_so(expressions):
    number = expressions.leaf("batch", "x", (4,), frozenset({"dp"}))
    found, due = Words(expressions, {}, {}).pair(number, number)
    assert found == "'x', another one along dp" and due == "'x', the same along dp"


def test_a_text_ends_however_often_an_expression_is_used(expressions):
    numbers = [expressions.leaf(STATE, name, (4,)) for name in "xy"]
    for _ in range(60):
        numbers = [expressions.apply("Max", (), [number, number, number], (4,)) for number in numbers]
    texts = Words(expressions, {}, {}).pair(*numbers)
    assert max(map(len, texts)) < 100_000
