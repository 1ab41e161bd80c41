"""Shardings over several axes: which ranks have a value, and the shapes that follow."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.records.mesh import Mesh
from gopt.records.placements import (
    FLAG_COUNT,
    FULLY_REPLICATED,
    PER_MEMBER,
    REPLICATED,
    FlatShard,
    OnMember,
    Partial,
    Shard,
    Sharding,
    Window,
    WindowTerms,
    holder,
)

MESH = Mesh((("dp", 2), ("shard", 3), ("tp", 2)))
SPAN = FlatShard((0, 4, 4, 10), 2, 10)
WINDOW, TERMS = Window(1, ((-1, 4), (2, 7), (5, 6)), 6), WindowTerms(1, ((0, 2), (1, 6), (5, 6)), 6)


def test_along_one_axis_it_is_replicated_along_the_others():
    sharding = Sharding.along("shard", OnMember(1))
    assert [rank for rank in range(MESH.ranks) if sharding.covers(MESH.coordinates(rank))] == [2, 3, 8, 9]
    assert sharding.on("dp") == sharding.on("tp") == REPLICATED
    assert Sharding.along("shard", REPLICATED) is FULLY_REPLICATED
    assert all(FULLY_REPLICATED.covers(MESH.coordinates(rank)) for rank in range(MESH.ranks))


def test_two_axes_at_once():
    sharding = Sharding((("shard", SPAN), ("tp", OnMember(1))))
    held = [rank for rank in range(MESH.ranks) if sharding.covers(MESH.coordinates(rank))]
    assert held == [1, 5, 7, 11], "members 0 and 2 of shard have elements; of them only member 1 of tp"
    assert sharding.flat == ("shard", SPAN)
    assert [sharding.part(MESH.coordinates(rank)) for rank in held[:2]] == [(2, 4), (4, 10)]
    assert str(sharding).endswith("along shard, on member 1 alone along tp")


@pytest.mark.parametrize("rank, shape", [(0, (6, 3)), (1, (6, 4)), (4, (6, 3)), (11, (6, 4))])
def test_a_dimension_shrinks_along_its_axis(rank, shape):
    assert Sharding.along("tp", Shard(1, (3, 4))).local_shape((6, 7), MESH.coordinates(rank)) == shape


def test_two_dimensions_along_two_axes():
    sharding = Sharding((("shard", Shard(0, (1, 0, 5))), ("tp", Shard(1, (3, 4)))))
    shapes = {sharding.local_shape((6, 7), MESH.coordinates(rank)) for rank in range(6)}
    assert shapes == {(1, 3), (1, 4), (0, 3), (0, 4), (5, 3), (5, 4)}
    assert sharding.sharding_axes == ("shard", "tp")


def test_parts_of_a_bucket_are_flat_and_add_up():
    sharding = Sharding.along("shard", SPAN)
    lengths = [sharding.local_shape((8,), {"shard": member})[0] for member in range(3)]
    assert lengths == [2, 0, 6] and sum(lengths) == SPAN.stop - SPAN.start


def test_two_axes_of_one_dimension():
    """Each part of one axis is whole runs of the other: a member of both has what both have."""
    outer, inner = Shard(0, (4, 4)), Shard(0, (2, 2), runs=2)
    assert outer.fits(inner) and inner.fits(outer)
    assert not outer.fits(Shard(0, (4, 4))) and not outer.fits(Shard(0, (3, 1), runs=2))
    assert not outer.fits(Shard(0, (3, 3), runs=2)), "dimensions of other lengths"
    assert outer.fits(Shard(1, (1, 6)))
    sharding = Sharding((("shard", outer), ("tp", inner)))
    assert sharding.local_shape((8, 3), {"shard": 0, "tp": 1}) == (2, 3)


@pytest.mark.parametrize(
    ("sizes", "alone"),
    [((0, 7), True), ((7, 0, 0), True), ((3, 4), False), ((7,), False), ((0, 0), False), ((1, 0), True)],
)
def test_one_member_alone_has_a_dimension(sizes, alone):
    assert Shard(0, sizes).alone == alone


@pytest.mark.parametrize(
    ("start", "stop", "holder"),
    [(0, 4, 0), (1, 3, 0), (4, 10, 2), (3, 4, 0), (3, 5, None), (0, 10, None), (4, 4, None), (9, 10, 2)],
)
def test_the_one_member_that_has_all_elements(start, stop, holder):
    assert FlatShard((0, 4, 4, 10), start, stop).holder == holder


def test_whole_tensors_one_behind_the_other():
    assert FlatShard.joined((0, 2, 2), (4, 5, 1), 3) == FlatShard.whole((0, 4, 4, 10))
    assert FlatShard.joined((1, 0), (4, 5), 2) is None
    assert FlatShard.joined((0, 2, 1), (4, 5, 1), 3) is None


def test_a_partial_value_has_terms_where_it_says():
    assert [Partial("sum").covers(member) for member in range(3)] == [True, True, True]
    assert [Partial("sum", SPAN).covers(member) for member in range(3)] == [True, False, True]
    assert [Partial("max", OnMember(1)).covers(member) for member in range(3)] == [False, True, False]


def test_runs_are_named_where_there_are_several():
    assert str(Shard(1, (3, 4))) == "sharded along dimension 1 in [3, 4]"
    assert str(Shard(1, (3, 4), runs=2)) == "sharded along dimension 1 in [3, 4] of each of 2 runs"


def test_a_window_has_the_length_of_its_range():
    window = Sharding.along("h", Window(1, ((-1, 4), (2, 7)), 6))
    assert [window.local_shape((2, 6, 3), {"h": member}) for member in range(2)] == [(2, 5, 3), (2, 5, 3)]


@pytest.mark.parametrize(
    ("placement", "members"),
    [
        (REPLICATED, [0, 1, 2]), (PER_MEMBER, [0, 1, 2]), (FLAG_COUNT, [0, 1, 2]), (OnMember(1), [1]), (SPAN, [0, 2]),
        (Shard(0, (3, 0, 4)), [0, 1, 2]), (WINDOW, [0, 1, 2]), (TERMS, [0, 1, 2]), (Partial("sum"), [0, 1, 2]),
    ],
    ids=str,
)  # fmt: skip
def test_the_members_that_have_some_of_a_value(placement, members):
    """One with an empty part of a dimension has that: an array without elements."""
    assert [member for member in range(3) if placement.covers(member)] == members


@pytest.mark.parametrize(("sizes", "runs"), [((3, 0, 4), 1), ((0, 7), 1), ((2, 1), 3), ((1, 0, 2, 2), 4)])
def test_parts_of_a_dimension_are_its_elements(sizes, runs):
    """Runs one behind the other: a member has its columns of the table of runs."""
    shard, cuts = Shard(0, sizes, runs), np.cumsum([0, *sizes])
    whole = np.arange(shard.length)
    table = whole.reshape(runs, sum(sizes))
    for member in range(len(sizes)):
        columns = table[:, cuts[member] : cuts[member + 1]]
        assert np.concatenate([whole[start:stop] for start, stop in shard.parts(member)]).tolist() == [*columns.flat]
        assert shard.part(member) == shard.parts(member)[0] == (cuts[member], cuts[member + 1])
        assert shard.local(member) == columns.size


def test_parts_of_a_bucket_are_its_elements():
    bucket = np.arange(10)
    held = [bucket[max(SPAN.start, low) : min(SPAN.stop, high)] for low, high in ((0, 4), (4, 4), (4, 10))]
    assert [bucket[slice(*SPAN.part(member))].tolist() for member in range(3)] == [part.tolist() for part in held]
    assert [SPAN.length(member) for member in range(3)] == [part.size for part in held] == [2, 0, 6]
    assert [FlatShard(SPAN.cuts, 0, 2).length(member) for member in range(3)] == [2, 0, 0]
    assert FlatShard.whole((0, 4, 4, 10)) == FlatShard((0, 4, 4, 10), 0, 10)


def test_windows_have_the_lengths_of_their_ranges():
    assert WINDOW.sizes == (5, 5, 1) and TERMS.sizes == (2, 5, 1)
    assert [WINDOW.local(member) for member in range(3)] == [5, 5, 1]


@pytest.mark.parametrize(
    ("place", "shapes"),
    [
        *((shard, [(2, 4, 3), (2, 0, 3), (2, 2, 3)]) for shard in (Shard(1, (4, 0, 2)), Shard(1, (2, 0, 1), runs=2))),
        (WINDOW, [(2, 5, 3), (2, 5, 3), (2, 1, 3)]), (TERMS, [(2, 2, 3), (2, 5, 3), (2, 1, 3)]),
        (SPAN, [(2,), (0,), (6,)]),
        *((place, [(2, 6, 3)] * 3) for place in (REPLICATED, PER_MEMBER, OnMember(1), Partial("sum"), FLAG_COUNT)),
    ],
    ids=str,
)  # fmt: skip
def test_the_shape_that_a_rank_has(place, shapes):
    sharding = Sharding((("dp", OnMember(0)), ("shard", place)))
    assert [sharding.local_shape((2, 6, 3), {"dp": 0, "shard": member}) for member in range(3)] == shapes


def test_of_nothing_every_part_is_nothing():
    assert Sharding.along("tp", Shard(0, (0, 0))).local_shape((0, 3), {"tp": 1}) == (0, 3)


def test_the_axes_whose_members_have_different_parts():
    given = (("a", OnMember(1)), ("b", WINDOW), ("c", TERMS), ("d", Shard(0, (1, 1))), ("e", PER_MEMBER), ("f", SPAN))
    assert Sharding(given).sharding_axes == ("b", "c", "d", "f")
    assert Sharding(given).flat == ("f", SPAN)
    assert Sharding(given[:-1]).flat is None


def test_the_one_member_that_has_a_value():
    assert holder(OnMember(2)) == 2
    assert holder(FlatShard(SPAN.cuts, 4, 10)) == 2
    for placement in (SPAN, REPLICATED, PER_MEMBER, Partial("sum", OnMember(2)), Shard(0, (0, 7))):
        assert holder(placement) is None
