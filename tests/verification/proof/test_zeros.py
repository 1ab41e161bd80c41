"""Elements that are said to be zero are zero for numbers drawn at random."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_selections import factors, ranges

from gopt.verification.proof.constants import taken
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.selections import normal
from gopt.verification.proof.zeros import are_zero

WAYS = ("padded", "padded", "view", "take", "permuted", "product", "sum", "summed", "inverse")
Drawn = tuple[int, np.ndarray]


def padded(expressions: Expressions, number: int, value: np.ndarray, draw: random.Random) -> Drawn:
    pads = np.array([draw.choice([0, 1, 2]) for _ in range(2 * value.ndim)], np.int64)
    beside = draw.choice([0, 0, 1])
    amounts = expressions.leaf("constant", pads.tobytes(), pads.shape)
    expressions.arrays[amounts] = pads
    some = np.pad(value, list(zip(pads[: value.ndim], pads[value.ndim :])), constant_values=beside)
    operands = [number, amounts, expressions.constant(beside, ())]
    return expressions.apply("Pad", ((), 0), operands, some.shape), some


def made(expressions: Expressions, pairs: list[Drawn], draw: random.Random) -> Drawn:
    """An operator on drawn values."""
    (number, value), way = draw.choice(pairs), draw.choice(WAYS)
    shape, rank = value.shape, value.ndim
    if way == "padded" and rank and value.size < 100:
        return padded(expressions, number, value, draw)
    if way == "view":
        value = value.reshape(factors(draw, value.size))
        return expressions.view(number, value.shape), value
    if way == "take":
        chosen = normal([ranges(draw, size) if draw.random() < 0.4 else None for size in shape], shape)
        some = taken(value, chosen)
        return (expressions.take(number, chosen), some) if some.size else (number, value)
    if way == "permuted":
        perm = tuple(draw.sample(range(rank), rank))
        return expressions.apply("permuted", perm, [number], tuple(shape[dim] for dim in perm)), value.transpose(perm)
    if way == "summed" and rank > 1:
        axes = draw.sample(range(rank), draw.randint(1, rank - 1))
        return expressions.summed(number, axes), value.sum(tuple(axes), keepdims=True)
    if way == "inverse":
        return expressions.product([number], (-1,)), 1 / value
    other, second = draw.choice([pair for pair in pairs if pair[1].shape == shape])
    law = expressions.product if way == "product" else expressions.added
    result = expressions.elementwise(lambda row: law(row, (1, 1)), [number, other])
    return result, value * second if way == "product" else value + second


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_elements_said_to_be_zero_are_zero(start: int) -> None:
    said = zeros = 0
    for seed in range(start, start + 100):
        draw, expressions, numbers = random.Random(seed), Expressions({}), np.random.default_rng(seed)
        shape = tuple(draw.choice([1, 2, 3]) for _ in range(draw.randint(1, 3)))
        pairs = [(expressions.leaf("input", name, shape), numbers.standard_normal(shape)) for name in "xy"]
        with np.errstate(all="ignore"):
            for _ in range(10):
                pairs.append(made(expressions, pairs, draw))
        for number, value in pairs:
            for _ in range(4):
                sizes = value.shape
                chosen = normal([ranges(draw, size) if draw.random() < 0.6 else None for size in sizes], sizes)
                some = taken(value, chosen)
                zero = bool(some.size) and not some.any()
                found = bool(some.size) and are_zero(expressions, number, chosen)
                assert zero or not found, seed
                said, zeros = said + found, zeros + zero
    assert said > zeros / 2 > 10
