"""Which places of a dimension members take from one another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gopt.records.placements import Shard, Window
from gopt.spmd.halo import Halo, HaloPiece, shared_like, tiled, window

THREE = Halo((11, 11, 11), ((-1, 12), (10, 23), (21, 34)))


def test_each_member_hands_out_what_others_read():
    assert THREE.strips == (((10, 11),), ((11, 12), (21, 22)), ((22, 23),))
    assert THREE.strip_sizes == (1, 2, 1)
    assert THREE.sends == 3, "on a ring the strips of all others pass through a member"
    assert [THREE.border(member) for member in range(3)] == [(1, 0), (0, 0), (0, 1)]


def test_a_window_is_put_together_of_runs():
    assert THREE.runs(1) == [
        ((10, 11), [HaloPiece(10, 11, 0, strips=True)]), ((11, 22), [HaloPiece(11, 22, 0)]),
        ((22, 23), [HaloPiece(22, 23, 3, strips=True)]),
    ]  # fmt: skip


def test_a_sum_takes_the_terms_that_the_exchange_gave():
    """Who has a place of another's part hands its term out; whoever owns the place adds it."""
    total = Halo(THREE.sizes, THREE.ranges, "sum")
    assert total.strips == (((11, 12),), ((10, 11), (22, 23)), ((21, 22),))
    assert total.runs(1) == [
        ((11, 12), [HaloPiece(11, 12, 0, strips=True), HaloPiece(11, 12, 1)]), ((12, 21), [HaloPiece(12, 21, 2)]),
        ((21, 22), [HaloPiece(21, 22, 11), HaloPiece(21, 22, 3, strips=True)]),
    ]  # fmt: skip
    assert Halo((2, 2), ((0, 1), (3, 4)), "sum").runs(0) == [((0, 1), [HaloPiece(0, 1, 0)]), ((1, 2), [])], "no terms"


def test_a_window_wider_than_a_neighbours_part_takes_from_several():
    halo = Halo((1, 1, 1, 1), ((0, 4), (0, 2), (1, 3), (2, 4)))
    assert [pieces[0].strips for _, pieces in halo.runs(0)] == [False, True, True, True]
    assert halo.strip_sizes == (1, 1, 1, 1)


def test_strips_that_meet_are_one():
    assert Halo((4, 4), ((2, 8), (0, 6)), "exchange").strips == (((0, 4),), ((4, 8),))
    assert Halo((8, 0, 0), ((0, 8), (1, 5), (4, 7))).strips[0] == ((1, 7),)


def test_of_a_whole_value_nothing_is_handed_out():
    cut = Halo((33,), THREE.ranges, "cut")
    assert cut.held == ((0, 33),) * 3
    assert cut.strip_sizes == (0, 0, 0)
    assert cut.sends == 0
    assert cut.runs(2) == [((21, 33), [HaloPiece(21, 33, 21)])]


def test_attributes_say_all_of_it():
    for halo in (THREE, Halo((33,), THREE.ranges, "cut"), Halo((1, 2), ((0, 3), (0, 3)), "sum")):
        assert Halo.of(halo.attributes) == halo


@pytest.mark.parametrize(
    ("sizes", "length", "like"),
    [((4, 4), 4, (2, 2)), ((17, 16), 17, (9, 8)), ((9, 8), 33, (17, 16)), ((3, 3, 2), 4, (2, 1, 1)), ((5,), 9, (9,)),
     ((4, 0, 4), 6, (3, 0, 3)), ((0, 0), 0, (0, 0))],
)  # fmt: skip
def test_another_length_is_shared_out_alike(sizes, length, like):
    assert shared_like(sizes, length) == like


def test_windows_that_lie_end_to_end_are_parts():
    assert window(2, ((0, 4), (4, 7)), 7) == Shard(2, (4, 3))
    assert window(2, ((0, 4), (4, 4), (4, 7)), 7) == Shard(2, (4, 0, 3))
    for ranges in (((0, 4), (3, 7)), ((0, 4), (4, 8)), ((-1, 4), (4, 7)), ((0, 4), (5, 7)), ((0, 3), (3, 6)),
                   ((0, 5), (5, 3), (3, 7))):  # fmt: skip
        assert not tiled(ranges, 7)
        assert isinstance(window(2, ranges, 7), Window)


@st.composite
def halos(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Parts of a dimension, some empty, and windows of any places, also outside the dimension; some empty."""
    sizes = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)))
    place = st.integers(-3, sum(sizes) + 3)
    ranges = [tuple(sorted((draw(place), draw(place)))) for _ in sizes]
    return sizes, tuple(ranges)


def taken(values: np.ndarray, piece: HaloPiece) -> np.ndarray:
    assert 0 <= piece.at <= piece.at + piece.stop - piece.start <= len(values), "a slice would cut it off"
    return values[piece.at : piece.at + piece.stop - piece.start]


def put_together(halo: Halo, values: list[np.ndarray]) -> list[np.ndarray]:
    """What members have after all strips were joined: of what they have before, by the pieces of the record."""
    members = range(len(halo.ranges))
    strips = [taken(values[member], piece) for member in members for piece in halo.strip_pieces(member)]
    joined = np.concatenate([[], *strips])
    assert len(joined) == sum(halo.strip_sizes)
    made = []
    for member in members:
        runs = halo.runs(member)
        assert [end for run, _ in runs for end in run][1:-1:2] == [start for (start, _), _ in runs][1:], "in order"
        parts = [
            sum((taken(joined if piece.strips else values[member], piece) for piece in pieces), np.zeros(stop - start))
            for (start, stop), pieces in runs
        ]
        made.append(np.concatenate([[], *parts]))
    return made


@given(halos())
def test_windows_by_numbers(drawn):
    """Every member gets the places of its window inside the dimension, of its part and of strips, or of the whole."""
    sizes, ranges = drawn
    whole = np.arange(1.0, sum(sizes) + 1)
    windows = [whole[max(start, 0) : max(stop, 0)].tolist() for start, stop in ranges]
    exchange = Halo(sizes, ranges)
    made = put_together(exchange, np.split(whole, np.cumsum(sizes)[:-1]))
    assert [each.tolist() for each in made] == windows
    assert all(len(pieces) == 1 for member in range(len(sizes)) for _, pieces in exchange.runs(member))
    cut = Halo((len(whole),), ranges, "cut")
    assert [each.tolist() for each in put_together(cut, [whole] * len(ranges))] == windows
    assert cut.sends == 0


@given(halos())
@example(((12, 0, 0, 0, 0, 0), ((0, 12), (6, 8), (1, 4), (8, 11), (9, 10), (2, 3))))
def test_strips_are_the_places_that_others_want(drawn):
    sizes, ranges = drawn
    ends = np.cumsum([0, *sizes])
    needed = []
    for member in range(len(sizes)):
        others = {place for other, each in enumerate(ranges) if other != member for place in range(*each)}
        needed.append(len(others & {*range(ends[member], ends[member + 1])}))
    halo = Halo(sizes, ranges)
    assert halo.strip_sizes == tuple(needed), "each of them once"
    assert halo.sends == max(sum(needed) - each for each in needed)
    for strips in halo.strips:
        assert all(before < after for (_, before), (after, _) in pairwise(strips)), "strips that meet are one"


@given(halos())
def test_sums_of_windows_by_numbers(drawn):
    """Terms for places outside the dimension are left out; a place that no window has is zero."""
    sizes, ranges = drawn
    length, generator = sum(sizes), np.random.default_rng(0)
    terms = [generator.integers(1, 9, stop - start).astype(float) for start, stop in ranges]
    total = np.zeros(length)
    for (start, stop), each in zip(ranges, terms):
        for place in range(max(start, 0), min(stop, length)):
            total[place] += each[place - start]
    made = put_together(Halo(sizes, ranges, "sum"), terms)
    assert [each.tolist() for each in made] == [each.tolist() for each in np.split(total, np.cumsum(sizes)[:-1])]


@given(halos())
def test_a_window_is_its_places_and_its_borders(drawn):
    sizes, ranges = drawn
    halo = Halo(sizes, ranges)
    for member, places in enumerate(ranges):
        outside = [sum(place < 0 for place in range(*places)), sum(place >= halo.length for place in range(*places))]
        assert list(halo.border(member)) == outside
