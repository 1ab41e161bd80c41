"""Meshes of a number of ranks, and what is weighed of each."""

from __future__ import annotations

import pytest
from helpers import source

from gopt.errors import OptionError, UnsupportedError
from gopt.offline.call_search import CallSearch
from gopt.offline.meshes import mesh_of, neighbours, weigh, weigh_meshes
from gopt.offline.plan import PlanChoice
from gopt.records.mesh import Mesh


@pytest.mark.parametrize(
    ("mesh", "link", "stages", "meshes"),
    [
        ("shard=1", None, True, []),
        ("shard=11", "1GB/s", True, []),
        ("shard=7", "1GB/s", False, ["tp=7", "ep=7", "cp=7", "sp=7", "h=7", "w=7"]),
        (
            "shard=12", "2x2GB/s,1GB/s", True,
            ["shard=6,tp=2", "shard=4,tp=3", "shard=3,tp=4", "shard=2,tp=6", "shard=6,ep=2", "shard=4,ep=3",
             "shard=6,cp=2", "shard=4,cp=3", "shard=6,sp=2", "shard=4,sp=3",
             "shard=6,h=2", "shard=4,h=3", "shard=6,w=2", "shard=4,w=3", "pp=2,shard=6", "pp=3,shard=4"],
        ),
        ("pp=8,shard=8,cp=2,tp=2", None, True, ["pp=8,shard=4,cp=2,tp=4", "pp=8,shard=4,cp=2,ep=2,tp=2",
                                               "pp=8,shard=4,cp=4,tp=2", "pp=8,shard=4,cp=2,sp=2,tp=2",
                                               "pp=8,shard=4,h=2,cp=2,tp=2", "pp=8,shard=4,w=2,cp=2,tp=2"]),
        # A link that names axes says something of each that is there, and of no other.
        ("shard=2,tp=1", "shard=2GB/s,tp=1GB/s", False,
         ["shard=1,tp=2", "shard=1,ep=2,tp=1", "shard=1,cp=2,tp=1", "shard=1,sp=2,tp=1", "shard=1,h=2,tp=1",
          "shard=1,w=2,tp=1"]),
    ],
)  # fmt: skip
def test_neighbours_of_a_mesh(mesh, link, stages, meshes):
    near = list(neighbours(Mesh.parse(mesh), link, stages=stages))
    assert [str(each) for each in near] == meshes
    assert {each.ranks for each in near} <= {Mesh.parse(mesh).ranks}


def test_links_that_name_an_axis_keep_it():
    assert str(mesh_of({"shard": 4}, "shard=2GB/s,tp=1GB/s")) == "shard=4,tp=1"
    assert str(mesh_of({}, "1GB/s")) == "shard=1"


def on_mesh(mesh: Mesh):
    if mesh.along("tp") == 4:
        raise UnsupportedError("nothing can be split")
    return source("mlp_adamw").training


def test_a_mesh_that_is_refused_is_left_out_with_the_reason():
    found = weigh_meshes(on_mesh, 4, CallSearch(caps=[None]))
    assert [str(mesh) for mesh in found.meshes] == ["shard=4", "shard=2,tp=2"]
    assert found.remarks["tp=4"] == "not weighed: nothing can be split"
    assert found.remarks["shard=2,ep=2"].startswith("not weighed: no weights of experts are found")
    assert found.remarks["shard=2,sp=2"].startswith("not weighed: no input of the batch has tokens")
    assert {str(each.mesh) for each in found.choices} == {"shard=4", "shard=2,tp=2"}
    with pytest.raises(UnsupportedError):
        weigh(on_mesh, Mesh.parse("tp=4"), CallSearch(caps=[None]))


def test_links_that_say_nothing_of_an_axis():
    found = weigh_meshes(on_mesh, 2, CallSearch("shard=1GB/s", caps=[None]), link="shard=1GB/s")
    assert [str(mesh) for mesh in found.meshes] == ["shard=2"]
    assert "--link gives no rate for axis 'tp'" in found.remarks["shard=1,tp=2"]
    with pytest.raises(OptionError, match="dp"):
        weigh_meshes(on_mesh, 2, CallSearch("dp=1GB/s", caps=[None]), link="dp=1GB/s")


def test_remarks_say_what_figures_do_not():
    found = weigh(lambda mesh: source("gpt_adamw").training, Mesh.parse("tp=4"), CallSearch(caps=[None]))
    assert found.remarks["tp=4"].startswith("a product over 2 heads of 8 stays whole")
    assert found.remarks["tp=4"].endswith("no ranks share states: stages 1 to 3 are stage 0")
    found = weigh(lambda mesh: source("gpt_adamw").training, Mesh.parse("dp=2,tp=2"), CallSearch(caps=[None]))
    assert "shard=2 in place of other axes" in found.remarks["dp=2,tp=2"]


def weighed(name: str, ranks: int, **limits) -> dict[str, list[PlanChoice]]:
    found = weigh_meshes(lambda mesh: source(name).training, ranks, CallSearch(caps=[None], **limits)).choices
    assert len({(each.mesh, each.settings) for each in found}) == len(found), "each choice once"
    by_mesh: dict[str, list[PlanChoice]] = {}
    for each in found:
        by_mesh.setdefault(str(each.mesh), []).append(each)
    return by_mesh


def test_experts_and_tokens_are_divided_where_a_step_has_them():
    moe = weighed("families/moe_adamw", 4)
    assert {"shard=2,ep=2", "shard=2,cp=2", "shard=2,sp=2", "shard=2,tp=2"} <= moe.keys()
    gpt = weighed("gpt_adamw", 4)
    assert {"shard=2,cp=2", "shard=2,sp=2"} <= gpt.keys() and not any("ep" in mesh for mesh in gpt)
    assert not any(axis in mesh for mesh in weighed("cnn_sgd", 4) for axis in ("ep", "cp", "sp"))


@pytest.mark.rest
def test_what_fits_may_need_more_axes_than_one():
    """The search goes on from the mesh that holds least until something fits."""
    least = min(each.held for rows in weighed("families/moe_adamw", 8).values() for each in rows)
    deeper = weighed("families/moe_adamw", 8, memory=least - 1)
    assert any(each.held < least for each in deeper["ep=2,tp=4"]), sorted(deeper)


def test_a_refused_choice_leaves_the_others(monkeypatch):
    from gopt.offline import call_search

    def refusing(split, alike, topology, device):
        if alike[0].partition == "whole":
            raise UnsupportedError("tensors stay together")
        yield from estimate(split, alike, topology, device)

    estimate = call_search.estimate_costs
    monkeypatch.setattr(call_search, "estimate_costs", refusing)
    found = weigh(lambda mesh: source("mlp_adamw").training, Mesh.parse("shard=2"), CallSearch(caps=[None]))
    assert {each.settings.partition for each in found.choices} == {"flat", "rows"}
    assert found.remarks["shard=2, stage 1, whole, default buckets"] == "not weighed: tensors stay together"
