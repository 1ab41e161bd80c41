"""Region mappings by numbers: what members have after one, by the reference of the calls."""

from __future__ import annotations

import numpy as np
import pytest
from members import Array, graph_of, joined, run, simulated, taken
from placement_numbers import summed

from gopt.collectives.table import COLLECTIVES
from gopt.ir.graph import COMM, Node
from gopt.records.placements import REPLICATED, Partial, Placement, Shard, Window, WindowTerms
from gopt.tensor_parallel.builder import ExpansionBuilder

SHARDS = [
    Shard(0, (17, 16)), Shard(0, (33, 0)), Shard(0, (0, 20, 13)), Shard(1, (33, 32)), Shard(1, (7, 6), runs=5),
    Shard(1, (0, 13), runs=5), Shard(0, (3, 8), runs=3), Shard(1, (1, 0, 4), runs=13), Shard(2, (2, 1)),
    Shard(2, (0, 3, 0)),
]  # fmt: skip
WHOLE = np.random.default_rng(7).integers(-8, 8, (33, 65, 3)).astype(np.float32)


def mapped(whole: Array, before: Placement, after: Placement, members: int, opset: int = 20) -> list[Array]:
    """What members have of a value after its mapping."""
    graph = graph_of([], {"x": whole}, opset)
    build = ExpansionBuilder(graph, "tp")
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
    build = ExpansionBuilder(graph, "tp")
    build.convert("x", Partial("sum"), REPLICATED, "y")
    (call,) = build.nodes
    terms = [np.full((7, 13), 2048 if member == 0 else 1, np.float16) for member in range(5)]
    (made, *_) = COLLECTIVES[call.op_type].execute(call.attributes, [[each] for each in terms], "float16")
    assert made is not None
    assert (made[0] == 2052).all()


def test_one_dimension_for_another_is_one_call():
    graph = graph_of([], {"x": WHOLE}, 20)
    build = ExpansionBuilder(graph, "tp")
    build.convert("x", SHARDS[0], SHARDS[3], "y")
    assert [node.op_type for node in build.nodes] == ["AllToAll"]
    assert build.nodes[0].domain == COMM


def test_runs_of_one_dimension_for_runs_of_another_are_one_call():
    graph = graph_of([], {"x": WHOLE}, 20)
    build = ExpansionBuilder(graph, "tp")
    build.convert("x", SHARDS[6], SHARDS[4], "y")
    assert [node.op_type for node in build.nodes] == ["Reshape", "AllToAll", "Reshape"]


def test_constants_are_made_once():
    build = ExpansionBuilder(graph_of([], {"x": WHOLE}, 20), "tp")
    assert build.ints([1, 23]) == build.ints((1, 23)) != build.ints([12, 3])
    assert build.number(0.5, "float16") == build.number(0.5, "float16") != build.number(0.5, "float32")
    assert build.graph.initializers[build.number(0.5, "float16")].numpy().dtype == np.float16


@pytest.mark.parametrize("opset", [12, 13, 17, 18])
@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMax"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_reduction_names_its_axes_as_its_operator_set_does(opset, op_type, keepdims):
    build = ExpansionBuilder(graph_of([], {"x": WHOLE}, opset), "tp")
    build.reduction(op_type, "x", [0, 2], "y", keepdims=keepdims)
    values = {"x": WHOLE, **{name: each.numpy() for name, each in build.graph.initializers.items()}}
    (made,) = run(build.nodes, values, ["y"], opset)
    wanted = (np.sum if op_type == "ReduceSum" else np.max)(WHOLE, axis=(0, 2), keepdims=bool(keepdims))
    assert build.graph.types["y"].dims == made.shape
    assert (made == wanted).all()


def test_what_is_added_knows_its_pass():
    build = ExpansionBuilder(graph_of([Node("Relu", ["x"], ["y"])], {"x": WHOLE}, 20), "tp")
    build.convert("x", REPLICATED, SHARDS[4], "z")
    assert {node.made_by for node in build.nodes} == {"tensor-parallel"}


# --- halo -------------------------------------------------------------------------------------------------------------

WINDOWS = [
    (Shard(0, (17, 16)), ((-1, 18), (16, 34))),
    (Shard(0, (11, 11, 11)), ((-3, 14), (8, 25), (19, 36))),
    (Shard(0, (1, 31, 1)), ((-2, 4), (-1, 33), (29, 35))),  # wider than a neighbour's part: several hops
    (Shard(0, (2, 1, 0, 30)), ((0, 9), (5, 13), (3, 3), (0, 33))),
    (Shard(0, (8, 9, 8, 8)), ((0, 33), (0, 33), (0, 33), (0, 33))),
    (Shard(0, (17, 16)), ((20, 33), (0, 5))),  # nothing of its own
    (Shard(0, (17, 16)), ((-4, -1), (33, 35))),  # beside the dimension alone
    (Shard(0, (17, 16)), ((0, 15), (18, 31))),  # nothing of the other's
    (Shard(1, (33, 32)), ((-2, 35), (31, 66))),
    (Shard(2, (1, 1, 1)), ((0, 2), (0, 3), (1, 4))),
]  # fmt: skip


@pytest.mark.parametrize("border", ["zeros", "lowest"])
@pytest.mark.parametrize(("parts", "ranges"), WINDOWS)
def test_halo_exchange(parts, ranges, border):
    window = Window(parts.dim, ranges, parts.length, border)
    members = len(ranges)
    wanted = taken(WHOLE, window, members)
    for before in (parts, REPLICATED):
        made = mapped(WHOLE, before, window, members)
        assert all((one == other).all() for one, other in zip(made, wanted, strict=True))
        assert [each.shape[parts.dim] for each in made] == [stop - start for start, stop in ranges]


@pytest.mark.parametrize(("parts", "ranges"), WINDOWS)
def test_halo_sum(parts, ranges):
    terms = WindowTerms(parts.dim, ranges, parts.length)
    members = len(ranges)
    wanted = taken(summed(taken(WHOLE, terms, members), terms), parts, members)
    made = mapped(WHOLE, terms, parts, members)
    assert all((one == other).all() for one, other in zip(made, wanted, strict=True))


@pytest.mark.parametrize(("parts", "ranges"), WINDOWS)
def test_halo_exchange_and_halo_sum_are_duals(parts, ranges):
    """<exchange(x), y> = <x, sum(y)> for any terms y."""
    window, terms = Window(parts.dim, ranges, parts.length), WindowTerms(parts.dim, ranges, parts.length)
    members = len(ranges)
    y = taken(WHOLE, terms, members)
    there = mapped(WHOLE, parts, window, members)
    back = mapped(WHOLE, terms, parts, members)
    x = taken(WHOLE, parts, members)
    assert sum(float((a * b).sum()) for a, b in zip(there, y)) == sum(float((a * b).sum()) for a, b in zip(x, back))


def test_a_dimension_shared_out_anew_sends_what_moves():
    for before, after in [((17, 16), (16, 17)), ((0, 33), (33, 0)), ((10, 11, 12), (12, 11, 10)), ((5, 28), (5, 28))]:
        shards = Shard(0, before), Shard(0, after)
        if before != after:
            made = mapped(WHOLE, *shards, len(before))
            assert all((one == other).all() for one, other in zip(made, taken(WHOLE, shards[1], len(after))))


def test_halves_of_a_halo_are_summed_in_float32():
    """Of 2048 + 1 + 1 halves, one by one, nothing is left but 2048."""
    terms = WindowTerms(0, ((0, 3), (0, 3), (0, 3)), 3)
    graph = graph_of([], {"x": np.ones((3, 2), np.float16)}, 20)
    build = ExpansionBuilder(graph, "tp")
    build.convert("x", terms, Shard(0, (1, 1, 1)), "y")
    graph.nodes = build.nodes
    parts = [np.full((3, 2), 2048 if member == 0 else 1, np.float16) for member in range(3)]
    held = simulated(graph, {"x": terms, **build.placements}, {"x": np.ones((3, 2), np.float16)}, 3, {"x": parts})
    assert all((each == 2050).all() and each.dtype == np.float16 for each in held["y"])


def test_only_strips_that_others_need_are_joined():
    graph = graph_of([], {"x": WHOLE}, 20)
    build = ExpansionBuilder(graph, "tp")
    build.convert("x", Shard(0, (11, 11, 11)), Window(0, ((-1, 12), (10, 23), (21, 34)), 33), "y")
    (call,) = (node for node in build.nodes if node.domain == COMM)
    assert (call.op_type, call.attributes["sizes"]) == ("AllGather", [1, 2, 1])
    build.nodes.clear()
    build.convert("x", Shard(0, (17, 16)), Window(0, ((0, 9), (17, 33)), 33), "z")
    assert [node.op_type for node in build.nodes] == ["HaloJoin"], "nothing is sent"
