"""The grid of ranks: how it is read, what its axes mean, and who is in a group."""

from __future__ import annotations

import pytest

from gopt.errors import OptionError
from gopt.records.mesh import AXES, AxisKind, Mesh, axis_kinds


def test_a_name_near_nothing():
    with pytest.raises(OptionError) as caught:
        Mesh.parse("colour=2")
    assert all(name in caught.value.hints[0] for name in AXES)
    assert "--axis colour=replica" in caught.value.hints[1]


@pytest.mark.parametrize(
    ("said", "match"),
    [(["rep"], "cannot read rep="), (["rep=other"], "cannot read rep=other"), (["rep=part"], "cannot read rep=part"),
     (["tp=data"], "known as one of kind replica"), (["dp=replica"], "known as one of kind data"),
     (["rep=data", "rep=replica"], "two kinds"), (["a b=data"], "cannot read a b=data")],
)  # fmt: skip
def test_kinds_that_cannot_be(said, match):
    with pytest.raises(OptionError, match=match):
        axis_kinds(said)


def test_a_mesh_is_read_as_it_was_written():
    mesh = Mesh.parse("rep=2,zone=3,shard=2", axis_kinds({"rep": "replica", "zone": "data"}))
    assert Mesh.from_record(mesh.to_json()) == mesh
    assert mesh.data_axes == ("zone", "shard")
    assert (mesh.data_group, mesh.data_ranks, mesh.kind("rep")) == ("zone+shard", 6, AxisKind.REPLICA)
    assert "kinds" not in Mesh.parse("dp=2,shard=2,tp=2").to_json()


# --- groups -----------------------------------------------------------------------------------------------------------

GRID = Mesh.parse("dp=2,tp=3,shard=4")


def test_the_last_axis_varies_fastest():
    assert GRID.coordinates(0) == {"dp": 0, "tp": 0, "shard": 0}
    assert GRID.coordinates(23) == {"dp": 1, "tp": 2, "shard": 3}
    assert GRID.coordinates(4 * 3 + 4 + 2) == {"dp": 1, "tp": 1, "shard": 2}


@pytest.mark.parametrize("group", ["dp", "tp", "shard", "dp+shard", "dp+tp", "dp+tp+shard"])
def test_groups_part_the_ranks(group):
    """Every rank is in one group, in its own place, and all members agree on who is in it."""
    seen = set()
    for rank in range(GRID.ranks):
        members = GRID.members(group, rank)
        assert len(members) == GRID.size(group) and members[GRID.index(group, rank)] == rank
        assert {(GRID.first(group, other), GRID.members(group, other)) for other in members} == {(members[0], members)}
        seen.add(members)
    assert sorted(rank for members in seen for rank in members) == list(range(GRID.ranks))


def test_members_of_a_group_over_axes_apart():
    assert GRID.members("dp+shard", 5) == (4, 5, 6, 7, 16, 17, 18, 19)
    assert GRID.index("dp+shard", 17) == 5


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("ep", "names no axis of the mesh"),
        ("shard+dp", "in the order"),
        ("dp+dp", "in the order"),
        ("", "names no axis"),
    ],
)
def test_groups_that_are_none(group, said):
    with pytest.raises(OptionError, match=said):
        GRID.split(group)


@pytest.mark.parametrize(
    ("text", "said"),
    [("dp=2,dp=2", "named twice"), ("dp=0", "has size 0"), ("dp=-2", "has size -2"), ("d p=2", "is not an identifier"),
     ("dp", "cannot read 'dp'"), ("dp=two", "cannot read 'dp=two'"), ("", "cannot read ''"),
     ("dp=65537", "a mesh of 65537 ranks is too large"), ("dp=" + "9" * 40, r"more than 2\*\*63")],
)  # fmt: skip
def test_meshes_that_are_none(text, said):
    with pytest.raises(OptionError, match=said):
        Mesh.parse(text)


def test_axes_of_one_rank_are_not_live():
    mesh = Mesh.parse("dp=1,tp=2,shard=4")
    assert (mesh.live("dp+shard"), mesh.live("dp"), mesh.data_group, mesh.data_ranks) == (("shard",), (), "dp+shard", 4)
    assert (Mesh.parse("shard=1,tp=2").data_ranks, Mesh.parse("tp=2").data_group) == (1, None)
