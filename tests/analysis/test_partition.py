"""Placement is arithmetic: the worked values, balance at scale, and laws."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gopt.analysis.partition import (
    MIB,
    Item,
    Owners,
    assign,
    ceil_pieces,
    default_cap,
    lightest_window,
    next_fit,
    offsets,
    owner_cuts,
    packing_bound,
    plan_buckets,
    row_cuts,
    window_cuts,
)
from gopt.collectives.layout import flat_cuts

# Worked values of a parameter server's slicing: shape, pieces asked, least elements -> pieces.
WORKED = [
    ((3, 5), 10, 1024, [15]), ((1024,), 10, 1024, [1024]), ((28, 784), 10, 1024, [2352] * 9 + [784]),
    ((8, 1020), 10, 1024, [2040] * 4), ((800, 10), 10, 1024, [1150] * 6 + [1100]),
    ((28, 784), 10, 8192, [10976] * 2), ((8, 1020), 10, 8192, [8160]), ((800, 10), 10, 8192, [8000]),
    ((6, 33, 33, 33), 10, 8192, [35937] * 6), ((1000, 1000), 2, 8192, [500000] * 2),
    ((1000, 1000), 3, 8192, [334000, 334000, 332000]), ((1000, 1000), 2, 1048576, [1000000]),
    ((1000,), 2, 8192, [1000]), ((8191,), 4, 8192, [8191]), ((8192,), 4, 8192, [8192]), ((16383,), 4, 8192, [16383]),
    ((16384,), 4, 8192, [8192] * 2), ((16385,), 2, 8192, [8193, 8192]), ((1, 1000000), 4, 8192, [1000000]),
    ((3, 1000000), 4, 8192, [1000000] * 3), ((5, 10000), 4, 8192, [20000, 20000, 10000]),
    ((7, 8192), 4, 8192, [16384] * 3 + [8192]), ((128, 64), 2, 8192, [8192]), ((256, 64), 2, 8192, [8192] * 2),
    ((10,), 4, 1, [3, 3, 3, 1]), ((10, 1), 4, 1, [3, 3, 3, 1]), ((5,), 4, 1, [2, 2, 1]),
    ((30522, 768), 8, 8192, [2930688] * 7 + [2926080]), ((50257, 768), 16, 8192, [2413056] * 15 + [2401536]),
    ((), 4, 1, [1]), ((0, 4), 4, 1, [0]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "pieces", "least", "wanted"), WORKED)
def test_ceil_pieces(shape, pieces, least, wanted):
    assert ceil_pieces(shape, pieces, least) == wanted


def gpt2(width: int = 768, layers: int = 12, words: int = 50257) -> list[tuple[int, ...]]:
    """Shapes of a GPT-2: tied embedding, positions, blocks, the last norm."""
    block: list[tuple[int, ...]] = [
        (width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,),
        (width, 4 * width), (4 * width,), (4 * width, width), (width,),
    ]  # fmt: skip
    return [(words, width), (1024, width), *(block * layers), (width,), (width,)]


@pytest.mark.parametrize("ranks", [4, 8, 16, 64])
def test_balance_on_gpt2(ranks):
    shapes = gpt2()
    sizes = [math.prod(shape) for shape in shapes]
    assert sum(sizes) == 124_439_808

    def balance(cuts: list[int]) -> float:
        return max(stop - start for start, stop in pairwise(cuts)) * ranks / sum(sizes)

    assert balance(list(flat_cuts(sum(sizes), ranks))) <= 1.001
    assert balance(row_cuts(sizes, [size // shape[0] for size, shape in zip(sizes, shapes)], ranks)) <= 1.05
    names = [str(place) for place in range(len(sizes))]
    owners = assign(names, sizes, [0] * ranks, Owners.LARGEST_FIRST)
    load = [sum(size for size, owner in zip(sizes, owners) if owner == rank) for rank in range(ranks)]
    # The embedding alone is more than a rank's share: no way to place whole tensors is better.
    assert max(load) == max(max(sizes), max(load[1:])) and max(load) * ranks / sum(sizes) <= max(
        sizes[0] * ranks / sum(sizes), 4 / 3
    )


def test_owners():
    names, sizes = ["a", "b", "c", "d", "e"], [5, 1, 1, 1, 4]
    assert assign(names, sizes, [0, 0], Owners.LARGEST_FIRST) == [0, 1, 0, 1, 1]
    assert assign(names, sizes, [0, 0, 0], Owners.ROUND_ROBIN) == [0, 1, 2, 0, 1]
    assert assign(names, sizes, [0, 0], Owners.IN_ORDER) == [0, 0, 1, 1, 1]
    hashed = assign(names, sizes, [0] * 4, Owners.HASH)
    assert hashed == assign(names, [1] * 5, [9] * 4, Owners.HASH), "by the name alone"
    assert hashed[::-1] == assign(names[::-1], sizes, [0] * 4, Owners.HASH)


def test_largest_first_fills_what_is_empty():
    assert assign(["a", "b"], [3, 3], [100, 0, 0], Owners.LARGEST_FIRST) == [1, 2]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 9), st.data())
def test_row_cuts_stand_on_rows(rows, ranks, least, data):
    width = [data.draw(st.integers(1, 7)) for _ in rows]
    sizes = [count * each for count, each in zip(rows, width)]
    cuts = row_cuts(sizes, width, ranks, least)
    starts = offsets(sizes)
    assert len(cuts) == ranks + 1 and cuts[0] == 0 and cuts[-1] == starts[-1] and cuts == sorted(cuts)
    for cut in cuts[1:-1]:
        place = max(index for index, start in enumerate(starts) if start <= cut)
        if cut == starts[place]:
            continue
        assert (cut - starts[place]) % width[place] == 0
        assert starts[place + 1] - cut >= least, "the rest of the tensor is not a crumb"
    if least == 1:
        share = starts[-1] / ranks
        assert all(abs(cut - rank * share) <= max(width) for rank, cut in enumerate(cuts))


@pytest.mark.parametrize(
    ("sizes", "rows", "least", "cuts"),
    [
        ([4], [4], 1, [0, 0, 4]),
        ([8], [2], 4, [0, 4, 8]),
        ([8], [2], 5, [0, 8, 8]),
        ([10, 100], [1, 1], 50, [0, 10, 110]),
        ([100, 10], [1, 1], 50, [0, 100, 110]),
    ],
)
def test_a_cut_that_leaves_too_little_moves_to_the_nearer_end(sizes, rows, least, cuts):
    """Half of one row is cut in front of it, and a tensor in the middle behind it."""
    assert row_cuts(sizes, rows, 2, least) == cuts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 5), st.integers(0, 5))
def test_a_window_gives_each_piece_to_one_rank(pieces, first, after):
    ranks = first + len(pieces) + after
    cuts = window_cuts(pieces, first, ranks)
    shares = [stop - start for start, stop in pairwise(cuts)]
    assert shares == [0] * first + pieces + [0] * after
    load = [1] * ranks
    load[first : first + len(pieces)] = [0] * len(pieces)
    assert sum(load[lightest_window(load, len(pieces)) :][: len(pieces)]) == 0


def test_owner_cuts():
    assert owner_cuts([3, 4, 5], [0, 0, 2], 4) == [0, 7, 7, 12, 12]


def tensor(name: str, nbytes: int, order: int, *, ready: int = 0, key: str = "float32", alone: bool = False) -> Item:
    return Item(name, nbytes // 4, nbytes, key, ready, order, alone)


def planned(items: list[Item], cap: int) -> list[list[str]]:
    return [[item.name for item in bucket.items] for bucket in plan_buckets(items, cap)]


@pytest.mark.parametrize(
    ("cap", "wanted"),
    [
        (16, [["a", "b"], ["large"], ["c"]]),
        (12, [["a"], ["large"], ["b", "c"]]),
        (100, [["a", "b", "large", "c"]]),
        (0, [["a"], ["b"], ["large"], ["c"]]),
    ],
)
def test_buckets_are_filled_up_to_the_cap(cap, wanted):
    """A bucket may have the cap's bytes exactly; a tensor of the cap's size goes alone and closes no bucket."""
    sizes = {"a": 8, "b": 8, "large": 40, "c": 4}
    items = [tensor(name, nbytes, place, ready=place) for place, (name, nbytes) in enumerate(sizes.items())]
    assert planned(items[::-1], cap) == wanted


def test_buckets_come_back_as_they_are_complete_and_by_kind():
    items = [
        tensor("late", 4, 0, ready=9), tensor("half", 4, 1, ready=5, key="float16"), tensor("first", 4, 2, ready=1),
        tensor("cut", 4, 3, ready=0, alone=True), tensor("empty", 0, 4, ready=6, alone=True),
    ]  # fmt: skip
    assert planned(items, 100) == [["cut"], ["half"], ["empty"], ["late", "first"]]
    assert sorted(planned(items, 0)) == [["cut"], ["empty"], ["first"], ["half"], ["late"]]


@pytest.mark.parametrize(
    ("sizes", "calls", "bound"),
    [
        ([8, 8], 1, 1),
        ([8, 8, 4], 2, 2),
        ([8, 40, 8, 4], 3, 3),
        ([40, 40], 2, 2),
        ([], 0, 0),
        ([0, 0], 1, 1),
        ([9, 8, 9, 6], 3, 2),
    ],
)
def test_calls_of_a_cap_and_the_fewest_of_any_packing(sizes, calls, bound):
    assert (next_fit(sizes, 16), packing_bound(sizes, 16)) == (calls, bound)


@pytest.mark.parametrize(("total", "cap"), [(0, MIB), (16 * MIB, 2 * MIB), (1000 * MIB, 25 * MIB)])
def test_the_default_cap_is_an_eighth_between_bounds(total, cap):
    assert default_cap(total) == cap
