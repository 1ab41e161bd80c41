"""The grid of ranks: how it is read, what its axes mean, and who is in a group."""

from __future__ import annotations

import pytest

from gopt.errors import OptionError
from gopt.mesh import AXES, Mesh, Sees, axis_kinds


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
    assert (mesh.data_group, mesh.data_ranks, mesh.sees("rep")) == ("zone+shard", 6, Sees.REPLICA)
    assert "kinds" not in Mesh.parse("dp=2,shard=2,tp=2").to_json()
