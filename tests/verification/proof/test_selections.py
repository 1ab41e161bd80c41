"""Selections in other shapes: the same elements, by NumPy."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest

from gopt.verification.proof.constants import taken
from gopt.verification.proof.selections import (
    flattened,
    groups,
    inside,
    joined,
    normal,
    nth,
    positions,
    sizes_of,
    through,
    unflattened,
    wholes,
    within,
)


def ranges(draw: random.Random, size: int):
    ends = sorted(draw.sample(range(size + 1), min(size + 1, draw.choice([2, 4])) // 2 * 2))
    return joined(zip(ends[::2], ends[1::2]))


def factors(draw: random.Random, count: int) -> tuple[int, ...]:
    """A shape of as many elements."""
    sizes: list[int] = []
    while count > 1:
        sizes.append(draw.choice([size for size in range(2, count + 1) if count % size == 0]))
        count //= sizes[-1]
    for _ in range(draw.choice([0, 0, 1, 2])):
        sizes.insert(draw.randint(0, len(sizes)), 1)
    return tuple(sizes)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


@pytest.mark.parametrize("start", range(0, 4000, 500))
def test_a_selection_in_another_shape_has_the_same_elements(start: int) -> None:
    moved = found = 0
    for seed in range(start, start + 500):
        draw = random.Random(seed)
        shape = tuple(draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4)))
        chosen = normal([ranges(draw, size) if draw.random() < 0.4 else None for size in shape], shape)
        elements = taken(numbered(shape), chosen).reshape(-1)
        runs = flattened(chosen, shape)
        assert runs is not None and [at for begin, end in runs for at in range(begin, end)] == elements.tolist()
        back = unflattened(runs, shape)
        assert back is None or taken(numbered(shape), back).reshape(-1).tolist() == elements.tolist()
        other = factors(draw, prod(shape))
        in_other = through(shape, chosen, other)
        if in_other is not None:
            moved += 1
            assert taken(numbered(other), in_other).reshape(-1).tolist() == elements.tolist()
        part = factors(draw, len(elements))
        for whole, ours in wholes(shape, chosen, part):
            found += 1
            assert sizes_of(ours, whole) == part
            assert taken(numbered(whole), ours).reshape(-1).tolist() == elements.tolist()
    assert moved > 100 and found > 100


def test_ranges_of_ranges_and_back() -> None:
    for seed in range(500):
        draw = random.Random(seed)
        outer = ranges(draw, 12)
        positions = [at for begin, end in outer for at in range(begin, end)]
        inner = ranges(draw, len(positions))
        whole = inside(outer, inner)
        assert whole is not None
        assert [at for begin, end in whole for at in range(begin, end)] == [
            positions[at] for begin, end in inner for at in range(begin, end)
        ]
        assert within(outer, whole, 12) == inner
        if len(positions) < 12:
            assert within(outer, None, 12) is None


def test_a_selection_of_positions_that_stand_there_twice() -> None:
    found = 0
    for seed in range(500):
        draw = random.Random(seed)
        outer = joined((at, at + draw.choice([1, 2])) for at in (draw.randrange(6) for _ in range(5)))
        inner = joined((at, at + 1) for at in (draw.randrange(7) for _ in range(3)))
        chosen = within(outer, inner, 7)
        present = {at for begin, end in outer for at in range(begin, end)}
        assert (chosen is not None) == all(at in present for begin, end in inner for at in range(begin, end)), seed
        if chosen is not None:
            found += 1
            whole = inside(outer, chosen)
            assert whole is not None and positions(whole) == positions(inner), seed
    assert found > 100


def test_dimensions_that_are_joined_or_divided_together_have_as_many_elements() -> None:
    for seed in range(2000):
        draw = random.Random(seed)
        count = draw.choice([1, 2, 4, 6, 8, 12, 24])
        before, after = factors(draw, count), factors(draw, count)
        for ones in (False, True):
            pairs = list(groups(before, after, ones=ones))
            assert all(prod(before[old]) == prod(after[new]) for old, new in pairs)
            assert [at for old, _ in pairs for at in range(len(before))[old]] == list(range(len(before)))
            assert [at for _, new in pairs for at in range(len(after))[new]] == list(range(len(after)))


@pytest.mark.parametrize("seed", range(50))
def test_places_in_ranges_are_counted_as_in_a_list_of_all(seed):
    draw = random.Random(seed)
    runs = ranges(draw, 40) or ((3, 7),)
    every = np.array(positions(runs), np.int32)
    indices = np.array([draw.randrange(-every.size, every.size) for _ in range(12)], np.int32).reshape(3, 4)
    result = nth(runs, indices)
    assert result.dtype == np.int32 and np.array_equal(result, every[indices])


def test_places_in_ranges_too_long_for_a_list_are_counted():
    assert nth(((0, 5), (1 << 40, 1 << 50)), np.array([4, 5, -1])).tolist() == [4, 1 << 40, (1 << 50) - 1]
