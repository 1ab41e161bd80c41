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

WAYS = (
    "padded",
    "padded",
    "row",
    "view",
    "take",
    "permuted",
    "product",
    "sum",
    "broadcast",
    "summed",
    "inverse",
    "matrices",
)
Drawn = tuple[int, np.ndarray]


def padded(expressions: Expressions, number: int, value: np.ndarray, draw: random.Random) -> Drawn:
    pads = np.array([draw.choice([0, 1, 2]) for _ in range(2 * value.ndim)], np.int64)
    beside = draw.choice([0, 0, 1])
    amounts = expressions.leaf("constant", pads.tobytes(), pads.shape)
    expressions.arrays[amounts] = pads
    some = np.pad(value, list(zip(pads[: value.ndim], pads[value.ndim :])), constant_values=beside)
    operands = [number, amounts, expressions.constant(beside, ())]
    return expressions.apply("Pad", ((), 0), operands, some.shape), some


def matrices(expressions: Expressions, number: int, value: np.ndarray, draw: random.Random) -> Drawn:
    """A product with a matrix, a row of matrices, or a vector, on either side."""
    front = draw.random() < 0.5
    size, more = value.shape[-2:][0] if front else value.shape[-1], draw.choice([1, 2, 3])
    shapes = [(size,)] if value.ndim == 1 else [(size,), (more, size), (1, more, size)]
    shape = draw.choice(
        shapes if front else [shape if len(shape) == 1 else (*shape[:-2], size, more) for shape in shapes]
    )
    other = expressions.leaf("input", f"{number} {shape} {front}", shape)
    second = np.random.default_rng(number).standard_normal(shape)
    operands = [(other, second), (number, value)] if front else [(number, value), (other, second)]
    result = np.matmul(*(some for _, some in operands))
    return expressions.apply("MatMul", ((), 0), [of for of, _ in operands], result.shape), np.asarray(result)


def made(expressions: Expressions, pairs: list[Drawn], draw: random.Random) -> Drawn:
    """An operator on drawn values."""
    (number, value), way = draw.choice(pairs), draw.choice(WAYS)
    shape, rank = value.shape, value.ndim
    if way == "padded" and rank and value.size < 100:
        return padded(expressions, number, value, draw)
    if way == "row" and rank and value.size < 100:
        axis = draw.randrange(rank)
        beside = expressions.constant(0, shape) if draw.random() < 0.5 else number
        row = [number, beside] if draw.random() < 0.5 else [beside, number]
        values = [value if each == number else np.zeros(shape) for each in row]
        return expressions.concatenated(row, axis), np.concatenate(values, axis)
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
    if way == "matrices" and rank:
        return matrices(expressions, number, value, draw)
    if way == "broadcast":
        lower = [pair for pair in pairs if pair[1].ndim < rank and pair[1].shape == shape[rank - pair[1].ndim :]]
        other, second = draw.choice(lower or [(number, value)])
        return expressions.elementwise(expressions.added, [number, other]), value + second
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


@pytest.mark.parametrize("start", range(0, 600, 100))
def test_some_terms_of_a_sum_are_none_or_all_by_numbers(start: int) -> None:
    none = every = 0
    for seed in range(start, start + 100):
        draw, e, numbers = random.Random(seed), Expressions({}), np.random.default_rng(seed)
        shape = tuple(draw.choice([1, 2, 3]) for _ in range(draw.randint(1, 3)))
        pairs = [(e.leaf("input", name, shape), numbers.standard_normal(shape)) for name in "xy"]
        with np.errstate(all="ignore"):
            for _ in range(10):
                pairs.append(made(e, pairs, draw))
        sums = [(e.summed(number, [dim]), value, dim) for number, value in pairs for dim in range(value.ndim)
                if value.ndim > 1 and np.isfinite(value).all()]  # fmt: skip
        e.seal()
        for core, value, dim in sums:
            size, rank = value.shape[dim], value.ndim
            runs = draw.choice([ranges(draw, size), ((0, 1), (0, 1))])
            op, axes, operands, _ = e.all[core]
            if (op, axes) != ("sum along", (dim - rank,)) or e.shape(operands[0]) != value.shape or not runs:
                continue
            some = np.concatenate([value.take(range(*run), dim) for run in runs], dim).sum(dim)
            part = e.parted(core, core, (dim - rank,), size, runs)
            none, every = none + (e.uniform(part) == 0), every + (part == core)
            assert e.uniform(part) != 0 or not some.any(), seed
            assert part != core or np.allclose(some, value.sum(dim)), seed
    assert none and every


def test_a_sum_with_terms_of_another_shape_is_no_equal_sum() -> None:
    """The border of a row was looked for where the part of the matrix is."""
    e = Expressions({})
    a = e.leaf("input", "a", (4, 4))
    amounts = {shape: e.leaf("constant", bytes(shape), (2 * len(shape),)) for shape in ((4, 4), (4,))}
    e.arrays[amounts[4, 4]], e.arrays[amounts[4,]] = np.array([0, 0, 3, 0]), np.array([0, 3])
    matrix = e.apply("Pad", ((), 0), [e.leaf("input", "b", (1, 4)), amounts[4, 4]], (4, 4))
    vector = e.apply("Pad", ((), 0), [e.leaf("input", "c", (1,)), amounts[4,]], (4,))
    two, three = e.added([a, matrix]), e.added([a, matrix, vector])
    e.seal()
    assert three not in dict(e._equal_sums(two, (((2, 4),), None)))
