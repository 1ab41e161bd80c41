"""Shardings over several axes: which ranks have a value, and the shapes that follow."""

from __future__ import annotations

import pytest

from gopt.mesh import Mesh
from gopt.sharding.placements import EVERYWHERE, REPLICATED, FlatShard, OnMember, Shard, Sharding

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
