"""Which places of a dimension members take from one another."""

from __future__ import annotations

import pytest

from gopt.sharding.halo import Halo, Piece, shared_like, tiled, window
from gopt.sharding.placements import Shard, Window

THREE = Halo((11, 11, 11), ((-1, 12), (10, 23), (21, 34)))


def test_each_member_hands_out_what_others_read():
    assert THREE.strips == (((10, 11),), ((11, 12), (21, 22)), ((22, 23),))
    assert THREE.strip_sizes == (1, 2, 1)
    assert THREE.sends == 3, "on a ring the strips of all others pass through a member"
    assert [THREE.border(member) for member in range(3)] == [(1, 0), (0, 0), (0, 1)]


def test_a_window_is_put_together_of_runs():
    assert THREE.runs(1) == [
        ((10, 11), [Piece(10, 11, 0, strips=True)]), ((11, 22), [Piece(11, 22, 0)]),
        ((22, 23), [Piece(22, 23, 3, strips=True)]),
    ]  # fmt: skip


def test_a_sum_takes_the_terms_that_the_exchange_gave():
    """Who has a place of another's part hands its term out; whoever owns the place adds it."""
    total = Halo(THREE.sizes, THREE.ranges, "sum")
    assert total.strips == (((11, 12),), ((10, 11), (22, 23)), ((21, 22),))
    assert total.runs(1) == [
        ((11, 12), [Piece(11, 12, 0, strips=True), Piece(11, 12, 1)]), ((12, 21), [Piece(12, 21, 2)]),
        ((21, 22), [Piece(21, 22, 11), Piece(21, 22, 3, strips=True)]),
    ]  # fmt: skip
    assert Halo((2, 2), ((0, 1), (3, 4)), "sum").runs(0) == [((0, 1), [Piece(0, 1, 0)]), ((1, 2), [])], "no terms"


def test_a_window_wider_than_a_neighbours_part_takes_from_several():
    halo = Halo((1, 1, 1, 1), ((0, 4), (0, 2), (1, 3), (2, 4)))
    assert [pieces[0].strips for _, pieces in halo.runs(0)] == [False, True, True, True]
    assert halo.strip_sizes == (1, 1, 1, 1)


def test_strips_that_meet_are_one():
    assert Halo((4, 4), ((2, 8), (0, 6)), "exchange").strips == (((0, 4),), ((4, 8),))
    assert Halo((8, 0, 0), ((0, 8), (1, 5), (4, 7))).strips[0] == ((1, 7),)


def test_of_a_whole_value_nothing_is_handed_out():
    cut = Halo((33,), THREE.ranges, "cut")
    assert cut.strip_sizes == (0, 0, 0)
    assert cut.sends == 0
    assert cut.runs(2) == [((21, 33), [Piece(21, 33, 21)])]


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
    for ranges in (((0, 4), (3, 7)), ((0, 4), (4, 8)), ((-1, 4), (4, 7)), ((0, 4), (5, 7)), ((0, 3), (3, 6))):
        assert not tiled(ranges, 7)
        assert isinstance(window(2, ranges, 7), Window)
