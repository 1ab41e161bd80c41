"""Rank graphs: local types follow from shardings, and ranks that differ in constants alone share their nodes."""

from __future__ import annotations

import pytest
from helpers import source

import gopt
from gopt.records.mesh import Mesh

WIDE = 5


def test_ranks_in_the_middle_of_a_tensor_share_all_nodes():
    """With more ranks than boundaries of tensors, most cut one tensor alone: they differ in offsets."""
    sharded = gopt.shard(source("mlp_adamw"), 64, stage=2)
    classes: dict[tuple[int, ...], list[int]] = {}
    for rank in sharded.ranks:
        classes.setdefault(tuple(map(id, rank.blocks)), []).append(rank.rank)
    assert max(map(len, classes.values())) > 8
    alike = max(classes.values(), key=len)
    starts = {
        tuple(int(value[0]) for name, value in sharded.ranks[rank].constants.items() if name.endswith(".start"))
        for rank in alike
    }
    assert len(starts) == len(alike), "each has offsets of its own"


@pytest.mark.parametrize("mesh", ["shard=3", "dp=2,shard=2"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_everywhere_is_made_once(mesh, stage):
    sharded = gopt.shard(source("mlp_adamw"), Mesh.parse(mesh), stage=stage)
    shared = [[block for block in rank.blocks if block.shared] for rank in sharded.ranks]
    assert shared[0] and all(blocks == shared[0] for blocks in shared)
    for rank in sharded.ranks:
        assert [node for block in rank.blocks for node in block.calls] == list(rank.calls)
        assert all(node.domain == "gopt.comm" for node in rank.calls)
        assert sum(node.domain == "gopt.comm" for node in rank.nodes) == len(list(rank.calls))


ALIKE = {
    "stage 2": ("mlp_adamw", "dp=3,shard=2", {"stage": 2}, 2),
    "micro-steps": ("mlp_adamw", "dp=3,shard=2", {"stage": 3, "accumulate": 2}, 4),
    "broadcasts": ("mlp_adamw", "dp=3,shard=2", {"partition": "whole", "passes": {"shard": {"style": "broadcast"}}}, 2),
    "owners": ("mlp_muon", "dp=2,shard=2", {"stage": 1}, 2),
    "columns": ("mlp_adamw", "dp=2,shard=2,tp=2", {"stage": 2}, 4),
}
STAGES = {
    "stages": ("dp=2,pp=2,shard=2", {"stage": 2, "accumulate": 2, "schedule": "1f1b"}),
    "stages of columns": ("pp=2,dp=2,tp=2", {"accumulate": 2, "schedule": "zb-h1"}),
    "stages in a step": ("dp=2,pp=2,tp=2", {}),
}


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_that_differ_along_no_axis_of_a_graph_share_what_each_has_alone(name):
    fixture, mesh, options, contents = ALIKE[name]
    every = gopt.shard(source(fixture), mesh, **options)
    assert len({rank.content for rank in every.ranks}) == contents
    usages = {usage.rank: usage for usage in every.report().ranks}
    for number, usage in usages.items():
        alone = gopt.shard(source(fixture), mesh, only_ranks=[number], **options)
        assert [usage] == list(alone.report().ranks)
        for mine, own in zip((rank for rank in every.ranks if rank.rank == number), alone.ranks, strict=True):
            assert [node.to_bytes() for node in mine.nodes] == [node.to_bytes() for node in own.nodes]
            assert (mine.states, mine.accumulators, mine.types) == (own.states, own.accumulators, own.types)
            assert {name: value.tolist() for name, value in mine.constants.items()} == {
                name: value.tolist() for name, value in own.constants.items()
            }


@pytest.mark.parametrize("name", STAGES)
def test_ranks_of_a_stage_differ_in_the_numbers_of_peers(name):
    mesh, options = STAGES[name]
    every = gopt.shard(source("mlp_adamw"), mesh, **options)
    assert len({rank.kind for rank in every.ranks}) < len({rank.content for rank in every.ranks})
    for number in {rank.rank for rank in every.ranks}:
        alone = gopt.shard(source("mlp_adamw"), mesh, only_ranks=[number], **options)
        for mine, own in zip((rank for rank in every.ranks if rank.rank == number), alone.ranks, strict=True):
            assert [node.to_bytes() for node in mine.nodes] == [node.to_bytes() for node in own.nodes]
            assert (mine.states, mine.accumulators, mine.saved, mine.types) == (
                own.states, own.accumulators, own.saved, own.types
            )  # fmt: skip


@pytest.mark.parametrize("accumulate", [1, 2])
def test_local_lengths_add_up_to_the_bucket(accumulate):
    sharded = gopt.shard(source("mlp_adamw"), WIDE, stage=2, accumulate=accumulate)
    lengths: dict[tuple[str, str], list[int]] = {}
    for rank in sharded.ranks:
        for name, type in rank.types.items():
            if name not in rank.constants and len(type.dims) == 1 and name in sharded.program.sharded:
                lengths.setdefault((rank.phase.name, name), []).append(type.elements)
    assert any(name.endswith(".scattered") for _, name in lengths)
    for (_, name), parts in lengths.items():
        assert len(parts) == WIDE and sum(parts) == sharded.program.graph.types[name].elements


def test_a_node_on_an_owner_is_on_no_other_rank():
    sharded = gopt.shard(source("mlp_muon"), 3, stage=1)
    owned = [
        node
        for node in sharded.program.graph.nodes
        if any(str(p).startswith("on member") for _, p in node.sharding.by_axis)
    ]
    assert owned
    for node in owned:
        held = [
            rank.rank for rank in sharded.ranks if any(set(node.outputs) & set(each.outputs) for each in rank.nodes)
        ]
        assert held == [node.sharding.on("shard").member]
