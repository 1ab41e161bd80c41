"""Region mappings by numbers: what members have after one, by the reference of the calls."""

from __future__ import annotations

import numpy as np
import pytest
from members import Array, graph_of, joined, run, simulated, taken

from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, Node
from gopt.sharding.placements import REPLICATED, Partial, Placement, Shard
from gopt.tensor_parallel.builder import Builder

SHARDS = [
    Shard(0, (17, 16)), Shard(0, (33, 0)), Shard(0, (0, 20, 13)), Shard(1, (33, 32)), Shard(1, (7, 6), runs=5),
    Shard(1, (0, 13), runs=5), Shard(0, (3, 8), runs=3), Shard(1, (1, 0, 4), runs=13), Shard(2, (2, 1)),
    Shard(2, (0, 3, 0)),
]  # fmt: skip
WHOLE = np.random.default_rng(7).integers(-8, 8, (33, 65, 3)).astype(np.float32)


def mapped(whole: Array, before: Placement, after: Placement, members: int, opset: int = 20) -> list[Array]:
    """What members have of a value after its mapping."""
    graph = graph_of([], {"x": whole}, opset)
    build = Builder(graph, "tp")
    build.convert("x", before, after, "y")
    graph.nodes = build.nodes
    placements = {"x": before, **build.placements}
    values = {"x": whole}
    held_before = taken(whole, before, members)
    copies = [each.copy() for each in held_before]
    held = simulated(graph, placements, values, members)
    for mine, copy, made in zip(held["x"], copies, held["y"]):
        assert (mine == copy).all(), "operands keep their values"
        assert not np.shares_memory(mine, made) or mine.size == 0, "results are memory of their own"
    assert build.placements.get("y", REPLICATED) == after
    return held["y"]


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_gather_from_region_and_scatter_to_region(shard):
    members = len(shard.sizes)
    for each in mapped(WHOLE, shard, REPLICATED, members):
        assert (each == WHOLE).all()
    made = mapped(WHOLE, REPLICATED, shard, members)
    assert [each.shape[shard.dim] for each in made] == [shard.local(member) for member in range(members)]
    assert (joined(made, shard) == WHOLE).all()


@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_reduce_scatter_to_region(shard):
    members = len(shard.sizes)
    made = mapped(WHOLE, Partial("sum"), shard, members)
    wanted = taken(WHOLE, shard, members)
    assert all((mine == other).all() for mine, other in zip(made, wanted, strict=True))


@pytest.mark.parametrize("before", SHARDS[:7], ids=str)
@pytest.mark.parametrize("after", SHARDS, ids=str)
def test_transpose(before, after):
    if len(before.sizes) == len(after.sizes) and before != after:
        made = mapped(WHOLE, before, after, len(before.sizes))
        wanted = taken(WHOLE, after, len(before.sizes))
        assert all((mine == other).all() for mine, other in zip(made, wanted, strict=True))


@pytest.mark.parametrize("members", [2, 3, 4])
def test_reduce_from_region(members):
    for each in mapped(WHOLE, Partial("sum"), REPLICATED, members):
        assert (each == WHOLE).all()


def test_halves_are_summed_in_float32():
    """2048 + 1 + 1 + ... is 2048 in halves, one by one."""
    graph = graph_of([], {"x": np.ones((7, 13), np.float16)}, 20)
    build = Builder(graph, "tp")
    build.convert("x", Partial("sum"), REPLICATED, "y")
    (call,) = build.nodes
    terms = [np.full((7, 13), 2048 if member == 0 else 1, np.float16) for member in range(5)]
    (made, *_) = COLLECTIVES[call.op_type].execute(call.attributes, [[each] for each in terms], "float16")
    assert made is not None
    assert (made[0] == 2052).all()


def test_one_dimension_for_another_is_one_call():
    graph = graph_of([], {"x": WHOLE}, 20)
    build = Builder(graph, "tp")
    build.convert("x", SHARDS[0], SHARDS[3], "y")
    assert [node.op_type for node in build.nodes] == ["AllToAll"]
    assert build.nodes[0].domain == COMM


def test_runs_of_one_dimension_for_runs_of_another_are_one_call():
    graph = graph_of([], {"x": WHOLE}, 20)
    build = Builder(graph, "tp")
    build.convert("x", SHARDS[6], SHARDS[4], "y")
    assert [node.op_type for node in build.nodes] == ["Reshape", "AllToAll", "Reshape"]


def test_constants_are_made_once():
    build = Builder(graph_of([], {"x": WHOLE}, 20), "tp")
    assert build.ints([1, 23]) == build.ints((1, 23)) != build.ints([12, 3])
    assert build.number(0.5, "float16") == build.number(0.5, "float16") != build.number(0.5, "float32")
    assert build.graph.initializers[build.number(0.5, "float16")].numpy().dtype == np.float16


@pytest.mark.parametrize("opset", [12, 13, 17, 18])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMax"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_reduction_names_its_axes_as_its_operator_set_does(opset, op_type, keepdims):
    build = Builder(graph_of([], {"x": WHOLE}, opset), "tp")
    build.reduction(op_type, "x", [0, 2], "y", keepdims=keepdims)
    values = {"x": WHOLE, **{name: each.numpy() for name, each in build.graph.initializers.items()}}
    (made,) = run(build.nodes, values, ["y"], opset)
    wanted = (np.sum if op_type == "ReduceSum" else np.max)(WHOLE, axis=(0, 2), keepdims=bool(keepdims))
    assert build.graph.types["y"].dims == made.shape
    assert (made == wanted).all()


def test_what_is_added_knows_its_pass():
    build = Builder(graph_of([Node("Relu", ["x"], ["y"])], {"x": WHOLE}, 20), "tp")
    build.convert("x", REPLICATED, SHARDS[4], "z")
    assert {node.made_by for node in build.nodes} == {"tensor-parallel"}
