"""Meshes of a number of ranks, and what is weighed of each."""

from __future__ import annotations

import pytest
from helpers import source

from gopt.errors import OptionError, UnsupportedError
from gopt.offline.meshes import meshes_of, weigh
from gopt.records.mesh import Mesh


@pytest.mark.parametrize(
    ("ranks", "link", "meshes"),
    [
        (1, None, ["shard=1"]),
        (7, "1GB/s", ["shard=7", "tp=7"]),
        (6, "2x2GB/s,1GB/s", ["shard=6", "shard=3,tp=2", "shard=2,tp=3", "tp=6"]),
        (64, None, ["shard=64", "shard=32,tp=2", "shard=16,tp=4", "shard=8,tp=8"]),
        # A link that names axes says something of each that is there, and of no other.
        (4, "shard=2GB/s,tp=1GB/s", ["shard=4,tp=1", "shard=2,tp=2", "shard=1,tp=4"]),
        (4, "shard=2GB/s", ["shard=4", "shard=2,tp=2", "shard=1,tp=4"]),
    ],
)
def test_meshes_of_some_ranks(ranks, link, meshes):
    assert [str(mesh) for mesh in meshes_of(ranks, link)] == meshes


def on_mesh(mesh: Mesh):
    if dict(mesh.axes).get("tp") == 4:
        raise UnsupportedError("nothing can be split")
    return source("mlp_adamw").training


def test_a_mesh_that_is_refused_is_left_out_with_the_reason():
    found = weigh(on_mesh, meshes_of(4), caps=[None])
    assert [str(mesh) for mesh in found.meshes] == ["shard=4", "shard=2,tp=2"]
    assert found.remarks == {"tp=4": "not weighed: nothing can be split"}
    assert {str(each.mesh) for each in found.found} == {"shard=4", "shard=2,tp=2"}
    with pytest.raises(UnsupportedError):
        weigh(on_mesh, meshes_of(4)[2:])


def test_links_that_say_nothing_of_an_axis():
    found = weigh(on_mesh, meshes_of(2, "shard=1GB/s"), caps=[None], link="shard=1GB/s")
    assert [str(mesh) for mesh in found.meshes] == ["shard=2"]
    assert "--link gives no rate for axis 'tp'" in found.remarks["shard=1,tp=2"]
    with pytest.raises(OptionError):
        weigh(on_mesh, meshes_of(2), caps=[None], link="dp=1GB/s")


def test_remarks_say_what_figures_do_not():
    found = weigh(lambda mesh: source("gpt_adamw").training, meshes_of(4)[2:], caps=[None])
    assert found.remarks["tp=4"].startswith("a product over 2 heads of 8 stays whole")
    assert found.remarks["tp=4"].endswith("no ranks share states: stages 1 to 3 are stage 0")
    found = weigh(lambda mesh: source("gpt_adamw").training, [Mesh.parse("dp=2,tp=2")], caps=[None])
    assert "shard=2 in place of other axes" in found.remarks["dp=2,tp=2"]
