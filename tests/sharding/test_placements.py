"""Shardings over several axes: which ranks have a value, and the shapes that follow."""

from __future__ import annotations

import pytest

from gopt.mesh import Mesh
from gopt.sharding.placements import EVERYWHERE, REPLICATED, FlatShard, OnMember, Partial, Shard, Sharding, Window

MESH = Mesh((("dp", 2), ("shard", 3), ("tp", 2)))
SPAN = FlatShard((0, 4, 4, 10), 2, 10)


def test_along_one_axis_it_is_replicated_along_the_others():
    sharding = Sharding.along("shard", OnMember(1))
    assert [rank for rank in range(MESH.ranks) if sharding.covers(MESH.coordinates(rank))] == [2, 3, 8, 9]
    assert sharding.on("dp") == sharding.on("tp") == REPLICATED
    assert Sharding.along("shard", REPLICATED) is EVERYWHERE
    assert all(EVERYWHERE.covers(MESH.coordinates(rank)) for rank in range(MESH.ranks))


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
    assert outer.fits(Shard(1, (1, 6)))
    sharding = Sharding((("shard", outer), ("tp", inner)))
    assert sharding.local_shape((8, 3), {"shard": 0, "tp": 1}) == (2, 3)


@pytest.mark.parametrize(
    ("sizes", "alone"), [((0, 7), True), ((7, 0, 0), True), ((3, 4), False), ((7,), False), ((0, 0), False)]
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
