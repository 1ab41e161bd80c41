"""Movements of elements, drawn: two values are alike where NumPy finds the same elements at all places.

A border of zeros has the place -1."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
from test_selections import factors, ranges

from gopt.verification.proof.constants import taken
from gopt.verification.proof.exponentials import Expressions
from gopt.verification.proof.selections import normal


def moved(expressions: Expressions, number: int, places: np.ndarray, draw: random.Random) -> tuple[int, np.ndarray]:
    """A movement of an expression, and of the places of its elements."""
    shape, rank = places.shape, places.ndim
    way = draw.choice(["view", "take", "permuted", "repeated", "row", "lookup", "padded", "constant"])
    if way == "view":
        places = places.reshape(factors(draw, places.size))
        return expressions.view(number, places.shape), places
    if way == "take" and rank:
        chosen = normal([ranges(draw, size) if draw.random() < 0.4 else None for size in shape], shape)
        some = taken(places, chosen)
        return (expressions.take(number, chosen), some) if some.size else (number, places)
    if way == "permuted" and rank:
        perm = tuple(draw.sample(range(rank), rank))
        return expressions.apply("permuted", perm, [number], tuple(shape[dim] for dim in perm)), places.transpose(perm)
    if way == "repeated" and places.size < 200:
        longer = (
            *[draw.choice([1, 2, 3])] * draw.randint(0, 1),
            *(size if size > 1 else draw.choice([1, 2, 3]) for size in shape),
        )
        return expressions.linear({number: 1}, longer), np.broadcast_to(places, longer)
    if way == "row" and rank and places.size < 200:
        axis = draw.randrange(rank)
        return expressions.concatenated([number, number], axis), np.concatenate([places, places], axis)
    if way == "lookup" and rank:
        axis = draw.randrange(rank)
        index = np.array([draw.randrange(shape[axis]) for _ in range(draw.randint(1, 3))])
        position = expressions.leaf("constant", index.tobytes(), index.shape)
        expressions.arrays[position] = index
        some = np.take(places, index, axis)
        return expressions.apply("Gather", ((("axis", axis),), 0), [number, position], some.shape), some
    if way == "padded" and rank and places.size < 200:
        pads = np.array([draw.choice([0, 0, 1, 2]) for _ in range(2 * rank)])
        amounts = expressions.leaf("constant", pads.tobytes(), pads.shape)
        expressions.arrays[amounts] = pads
        zero, some = (
            expressions.constant(0, ()),
            np.pad(places, list(zip(pads[:rank], pads[rank:])), constant_values=-1),
        )
        return expressions.apply("Pad", ((), 0), [number, amounts, zero], some.shape), some
    if way == "constant" and rank and places.size < 200:
        axis, front = draw.randrange(rank), draw.random() < 0.5
        rows = expressions.constant(0, (*shape[:axis], 1, *shape[axis + 1 :]))
        values, parts = [number, rows], [places, np.full(expressions.shape(rows), -1)]
        row = expressions.concatenated(values[::-1] if front else values, axis)
        return row, np.concatenate(parts[::-1] if front else parts, axis)
    return number, places


@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_alike_are_the_same_elements_alone(start: int) -> None:
    same = found = 0
    for seed in range(start, start + 250):
        draw, expressions = random.Random(seed), Expressions({})
        shape = tuple(draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4)))
        root = expressions.leaf("input", "x", shape)
        pairs = [(root, np.arange(prod(shape)).reshape(shape))]
        for _ in range(12):
            pairs.append(moved(expressions, *draw.choice(pairs), draw))
        by_shape = [(one, two) for one in pairs for two in pairs if one[1].shape == two[1].shape and one[0] != two[0]]
        for (number, places), (second, others) in by_shape:
            assert expressions.shape(number) == places.shape, seed
            equal = bool((places == others).all())
            alike = expressions.alike(number, second)
            assert equal or not alike, seed
            same, found = same + equal, found + alike
    assert found > 0.6 * same > 100
