"""What is said to be above zero, never below zero, or a number, is so for numbers drawn at random."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from products import part
from test_selections import factors

from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.signs import ABOVE, NEVER_BELOW, sign

WAYS = ("exp", "square", "cube", "sum", "sum", "product", "inverse", "root", "log", "view", "summed", "total", "scaled",
        "plus one", "empty")  # fmt: skip
Drawn = tuple[int, np.ndarray]


def made(e: Expressions, pairs: list[Drawn], draw: random.Random) -> Drawn:
    """An operator on drawn values."""
    (number, value), way = draw.choice(pairs[-6:]), draw.choice(WAYS)
    if way == "exp" and (np.abs(value) < 5).all():
        return e.exp(number), np.exp(value)
    if way in ("square", "cube"):
        return e.product([number], [2 + (way == "cube")]), value ** (2 + (way == "cube"))
    if way == "inverse":
        return e.product([number], [-1]), 1 / value
    if way in ("root", "log"):
        op, function = ("Sqrt", np.sqrt) if way == "root" else ("Log", np.log)
        return e.apply(op, ((), 0) if way == "root" else (), [number], value.shape), function(value)
    if way == "view":
        shape = factors(draw, value.size)
        return e.view(number, shape), value.reshape(shape)
    if way == "summed" and value.ndim > 1:
        axes = draw.sample(range(value.ndim), draw.randint(1, value.ndim - 1))
        return e.summed(number, axes), value.sum(tuple(axes), keepdims=True)
    if way == "total":
        return e.total(number), value.sum()
    if way == "scaled":
        factor = draw.choice([-2, -1, 0, 3])
        return e.scaled(number, factor), value * factor
    if way == "plus one":
        return e.elementwise(e.added, [number, e.constant(1, value.shape)]), value + 1
    if way == "empty" and value.ndim > 1:
        part_of_none = e.take(number, (((0, 0),), *[None] * (value.ndim - 1)))
        return e.summed(part_of_none, [0]), value[:0].sum(0, keepdims=True)
    other, second = draw.choice([pair for pair in pairs if pair[1].shape == value.shape])
    if way == "product":
        return e.elementwise(lambda row: e.product(row, (1, 1)), [number, other]), value * second
    signs = draw.choice([(1, 1), (1, -1)])
    return e.elementwise(lambda row: e.added(row, signs), [number, other]), value + signs[1] * second


@pytest.mark.parametrize("start", part(range(0, 3000, 300), 2))
def test_signs_and_finite_values_are_as_said(start: int) -> None:
    said: Counter[str] = Counter()
    for seed in range(start, start + 300):
        draw, e, numbers = random.Random(seed), Expressions({}), np.random.default_rng(seed)
        shape = tuple(draw.choice([1, 2, 3]) for _ in range(draw.randint(1, 3)))
        values = [np.where(numbers.random(shape) < 0.2, 0, numbers.standard_normal(shape)) for _ in "xy"]  # zeros too
        pairs = [(e.leaf("input", name, shape), value) for name, value in zip("xy", values)]
        with np.errstate(all="ignore"):
            for _ in range(14):
                pairs.append(made(e, pairs, draw))
        for number, value in pairs:
            if not np.isfinite(value).all():
                assert not e.finite[number], (seed, number)
                continue
            magnitudes = np.abs(value[value != 0])
            if magnitudes.size and not 1e-100 < magnitudes.min() <= magnitudes.max() < 1e100:
                break  # beyond what float64 can tell from zero
            least = sign(e, number)
            assert least != ABOVE or (value > 0).all(), (seed, number)
            assert least != NEVER_BELOW or (value >= 0).all(), (seed, number)
            said.update({"above": least == ABOVE, "never below": least == NEVER_BELOW, "finite": e.finite[number]})
    assert min(said.values()) > 100, said
