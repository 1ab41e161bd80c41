"""What an input of random numbers is drawn from, as documents say it."""

from __future__ import annotations

import pytest

from gopt.documents.draws import Distribution, Draw
from gopt.documents.records import from_document, to_document

INTEGERS = Distribution.INTEGERS


def test_bounds_that_are_usual_are_not_written():
    assert to_document(Draw(INTEGERS, high=1000)) == {"distribution": "integers", "high": 1000}
    for draw in (Draw(Distribution.NORMAL, mean=1.0), Draw(Distribution.BERNOULLI, p=0.1), Draw(INTEGERS, low=-3)):
        assert from_document(Draw, to_document(draw)) == draw


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (Draw(Distribution.NORMAL, mean=1, std=0.5), "normal(1, 0.5)"),
        (Draw(Distribution.UNIFORM, low=-0.5), "uniform [-0.5, 1)"),
        (Draw(INTEGERS, low=100, high=2000000), "integers [100, 2000000)"),
        (Draw(Distribution.BERNOULLI, p=0.1), "bernoulli(0.1)"),
        (Draw(Distribution.PERMUTATION), "permutation"),
    ],
)
def test_draws_in_words(draw, text):
    assert str(draw) == text


@pytest.mark.parametrize(
    ("draw", "dtype", "scalar", "said"),
    [
        (Draw(Distribution.NORMAL), "int64", False, "it holds int64, not floats"),
        (Draw(Distribution.NORMAL, std=-1.0), "float32", False, "its deviation is -1"),
        (Draw(Distribution.NORMAL, mean=float("nan")), "float32", False, "its bounds are not finite"),
        (Draw(Distribution.UNIFORM, low=1.0), "float16", False, "its range is empty"),
        (Draw(INTEGERS, high=5), "float32", False, "it holds float32, not integers"),
        (Draw(INTEGERS, high=2.5), "int64", False, "its bounds are not whole numbers of int64"),
        (Draw(INTEGERS, high=129), "int8", False, "its bounds are not whole numbers of int8"),
        (Draw(INTEGERS, low=-1, high=3), "uint8", False, "its bounds are not whole numbers of uint8"),
        (Draw(INTEGERS, high=256), "uint8", False, None),
        (Draw(Distribution.BERNOULLI, p=1.5), "bool", False, "its probability is 1.5"),
        (Draw(Distribution.BERNOULLI), "string", False, "it holds string, not numbers"),
        (Draw(Distribution.PERMUTATION), "int32", True, "it has no dimension"),
        (Draw(Distribution.PERMUTATION), "int32", False, None),
    ],
)
def test_what_cannot_be_drawn_is_said(draw, dtype, scalar, said):
    assert draw.fault(dtype, scalar) == said
