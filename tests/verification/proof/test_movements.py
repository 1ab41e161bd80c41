"""Movements of elements, drawn: two values are alike where NumPy finds the same elements at all places."""

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
    way = draw.choice(["view", "take", "permuted", "repeated", "row", "lookup"])
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
    assert found > 0.7 * same > 100
