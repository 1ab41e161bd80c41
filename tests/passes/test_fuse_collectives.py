"""Calls that travel together: never across a dependency, never another value, and never without saying why not."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from call_graphs import Calls, calls, run, same
from helpers import FIXTURES, source
from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import Recipe, build

import gopt
from gopt.analysis.partition import choose_cap, default_cap, next_fit, packing_bound
from gopt.errors import OptionError
from gopt.ir.graph import COMM, SPMD
from gopt.ir.load import load
from gopt.ir.types import TensorType
from gopt.passes.fuse_collectives import FusionOptions, fuse_collectives
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.records.placements import FlatShard, Sharding
from gopt.spmd.program import SpmdProgram
from gopt.verification.verify import Verifier

MIB = 1 << 20


def fused(step: SpmdProgram, **options) -> tuple[SpmdProgram, dict]:
    """The step after the pass, its ranks run before and after, and the facts."""
    before = run(step)
    change = fuse_collectives(step, FusionOptions(**options))
    same(before, run(step))
    return step, dict(change.figures)


def whys(facts: dict) -> list[str]:
    return [row["why"] for row in facts["neighbours"]]


def reduces(count: int, elements: int = 4) -> Calls:
    b = Calls()
    for _ in range(count):
        b.call("AllReduce", b.op("Neg", b.input((elements,))), reduce="sum")
    return b


@pytest.mark.parametrize("kind", ["AllReduce", "Broadcast", "ReduceScatter", "AllGather"])
@pytest.mark.parametrize("axis", [0, 1])
def test_every_kind_becomes_one_call(kind, axis):
    b = Calls()
    for columns in (2, 4, 6):
        x = b.op("Neg", b.input((4, columns)))
        if kind == "AllReduce":
            b.call(kind, x, reduce="mean")
        elif kind == "Broadcast":
            b.broadcast(x, root=1)
        else:
            (b.scatter if kind == "ReduceScatter" else b.gather)(x, axis)
    step, facts = fused(b.step())
    assert [node.op_type for node in calls(step)] == [kind]
    assert facts["keys"][0]["calls_before"] == 3 and facts["keys"][0]["calls_after"] == 1
    assert facts["keys"][0]["packing_bound"] == 1


def test_reduce_scatters_that_map_a_dimension_of_the_source_stay_apart(monkeypatch):
    b = Calls()
    for columns in (2, 4):
        b.scatter(b.op("Neg", b.input((4, columns))))
    module = sys.modules["gopt.passes.fuse_collectives.pack"]  # the package has a function of this name
    monkeypatch.setattr(module, "data_axes", lambda graph: frozenset())
    step, facts = fused(b.step())
    assert [node.op_type for node in calls(step)] == ["ReduceScatter"] * 2
    assert whys(facts) == ["a mapping of the source: members have parts of a dimension"]


def test_reduces_to_one_root_become_one_call():
    b = Calls(members=3)
    for _ in range(3):
        y = b.call("Reduce", b.op("Neg", b.input((4,))), reduce="sum", root=2)
        b.broadcast(b.op("Neg", y), root=2)
    # Off the root nobody may read what a Reduce makes: the ranks that are not are not run here.
    step = b.step()
    fuse_collectives(step, FusionOptions())
    assert [node.op_type for node in calls(step)] == ["Reduce", "Broadcast"]
    assert len(calls(step)[0].inputs) == 3


def test_neighbours_say_why():
    b = Calls()
    x = b.op("Neg", b.input((4,)))
    b.call("AllReduce", x, reduce="sum")
    b.call("AllReduce", x, reduce="max")
    b.broadcast(x, root=0)
    b.broadcast(x, root=1)
    half = b.op("Cast", x, to=10)
    b.types[half] = TensorType("float16", (4,))
    b.broadcast(half, root=1)
    b.call("AllReduce", x, reduce="sum", group="dp")
    step, facts = fused(b.step(mesh=Mesh((("dp", 2), ("shard", 2)))))
    assert len(calls(step)) == 6
    assert [why.split(":")[0] for why in whys(facts)] == [
        "different reduce", "different kind", "different root", "different dtype", "different kind",
    ]  # fmt: skip
    assert facts["fused_calls"] == 0


def test_a_chain_names_the_value_that_is_waited_for():
    b = Calls()
    first = b.call("AllReduce", b.input((4,)), reduce="sum")
    b.call("AllReduce", b.op("Neg", first), reduce="sum")
    step, facts = fused(b.step())
    assert len(calls(step)) == 2
    assert whys(facts)[0].startswith(f"one waits for the other: {first} ")


def test_a_call_that_reads_a_call():
    b = Calls()
    x = b.input((4,))
    b.call("AllReduce", b.call("AllReduce", x, reduce="sum"), reduce="sum")
    step, _ = fused(b.step())
    assert len(calls(step)) == 2


def test_two_kinds_that_would_wait_for_one_another_are_not_both_fused():
    """c reads d, and d' reads c': fusing {c, c'} and {d, d'} both would be a cycle."""
    b = Calls()
    d = b.call("AllReduce", b.input((4,)), reduce="sum")
    other = b.call("AllReduce", b.input((4,)), reduce="max")
    b.call("AllReduce", other, reduce="sum")
    b.call("AllReduce", d, reduce="max")
    step, facts = fused(b.step())
    assert len(calls(step)) == 3
    assert facts["fused_calls"] == 1


def test_parallel_chains_advance_side_by_side():
    """In file order the second chain stands behind the first; its calls wait for none of them."""
    b = Calls()
    for _ in range(2):
        x = b.input((4,))
        for _ in range(3):
            x = b.op("Neg", b.call("AllReduce", x, reduce="sum"))
    step, _ = fused(b.step())
    assert [len(node.inputs) for node in calls(step)] == [2, 2, 2]


@pytest.mark.parametrize("cap", [None, 40 / MIB])
def test_a_reduction_that_feeds_another_is_packed_level_by_level(cap):
    """Gradients as the backward makes them: a sum over one axis, cast or not, then the mean over another; and norms
    of what comes out, which are completed along the first axis again."""
    b = Calls()
    x = b.input((4, 4))
    norms = []
    for number in range(4):
        x = b.op("MatMul", x, x)
        made = b.call("AllReduce", b.op("Neg", x), reduce="sum", group="tp")
        made = b.op("Abs", made) if number % 2 else made
        mean = b.call("AllReduce", made, reduce="mean", group="dp")
        norms.append(
            b.call("AllReduce", b.op("Sqrt", b.op("Abs", mean, late=True), late=True), reduce="sum", group="tp")
        )
    for each in norms:
        b.op("Neg", each, late=True)
    step = b.step(mesh=Mesh((("dp", 2), ("tp", 2))))
    step, facts = fused(step, cap_mb=cap)
    found = [(node.attributes["group"], len(node.inputs)) for node in calls(step)]
    assert found == ([("tp", 4), ("dp", 4), ("tp", 4)] if cap is None else found)
    assert cap is None or facts["fused_calls"] == 0  # 64 bytes each: one tensor a call


def test_what_the_backward_waits_for_is_not_held_back():
    """The first sum is read by a product of the backward, so it does not wait for the second."""
    b = Calls()
    first = b.call("AllReduce", b.op("Neg", b.input((4, 4))), reduce="sum")
    second = b.call("AllReduce", b.op("MatMul", first, first), reduce="sum")
    b.call("AllReduce", second, reduce="max")
    step, facts = fused(b.step())
    assert [len(node.inputs) for node in calls(step)] == [1, 1, 1] and facts["fused_calls"] == 0


def test_readers_in_the_update_wait():
    """Each gradient's update stands right behind its call in the file."""
    b = Calls()
    x = b.input((4,))
    for _ in range(4):
        x = b.op("Neg", x)
        b.op("Neg", b.call("AllReduce", x, reduce="mean"), late=True)
    step, _ = fused(b.step())
    assert [len(node.inputs) for node in calls(step)] == [4]


def test_caps():
    sizes = {"cap_mb": 40 / MIB}
    step, facts = fused(reduces(5).step(), **sizes)
    assert [len(node.inputs) for node in calls(step)] == [2, 2, 1]
    assert whys(facts) == ["cap: more than 40 bytes"] * 2
    step, facts = fused(reduces(5).step(), max_tensors=3)
    assert [len(node.inputs) for node in calls(step)] == [3, 2]
    assert whys(facts) == ["count cap: more than 3 tensors"]
    step, facts = fused(reduces(5).step(), first_mb=16 / MIB)
    assert [len(node.inputs) for node in calls(step)] == [1, 4]
    step, facts = fused(reduces(3).step(), cap_mb=0)
    assert len(calls(step)) == 3
    assert facts["keys"][0]["packing_bound"] == 3 and "one tensor a call" in whys(facts)[0]


@pytest.mark.parametrize("elements", [25, 40])
def test_a_large_tensor_goes_alone_and_closes_nothing(elements):
    """One of exactly the cap is large as well."""
    b = Calls()
    for each in (4, elements, 4):
        b.call("AllReduce", b.op("Neg", b.input((each,))), reduce="sum")
    step, facts = fused(b.step(), cap_mb=100 / MIB)
    assert sorted(len(node.inputs) for node in calls(step)) == [1, 2]
    assert whys(facts)[0].startswith("at least the cap of 100 bytes by itself")


def test_cut_buckets_are_left_alone():
    b = Calls()
    for _ in range(2):
        b.call("ReduceScatter", b.input((8,)), shape=(4,), reduce="mean", cuts=[0, 4, 8])
    step, facts = fused(b.step())
    assert len(calls(step)) == 2
    assert whys(facts) == ["cut bucket: planned with the cap of shard"]


def test_nothing_to_do():
    b = Calls()
    b.op("Neg", b.input((4,)))
    assert fuse_collectives(b.step(), FusionOptions()).note == "there are no calls"


@pytest.mark.parametrize(
    "options", [{"cap_mb": -1.0}, {"cap_mb": float("inf")}, {"first_mb": float("nan")}, {"max_tensors": 0}]
)
def test_options_out_of_range(options):
    with pytest.raises(OptionError):
        fuse_collectives(reduces(2).step(), FusionOptions(**options))


# --- two calls that are one -----------------------------------------------------------------------------------------


def test_reduce_and_broadcast_are_an_all_reduce():
    b = Calls(members=3)
    for _ in range(2):
        b.op("Neg", b.broadcast(b.call("Reduce", b.input((4,)), reduce="mean", root=1), root=1))
    step, facts = fused(b.step())
    assert [(node.op_type, len(node.inputs)) for node in calls(step)] == [("AllReduce", 2)]
    assert calls(step)[0].attributes["reduce"] == "mean"
    assert facts["reduce_broadcast"] == 2


def test_the_report_names_the_root_of_calls_that_have_one():
    b = Calls()
    b.broadcast(b.op("Neg", b.input((4,))), root=0)
    b.call("AllReduce", b.op("Neg", b.input((4,))), reduce="sum")
    _, facts = fused(b.step())
    assert [(row["kind"], row.get("root")) for row in facts["keys"]] == [("AllReduce", None), ("Broadcast", 0)]


def test_a_call_between_two_ranks_says_so():
    b = Calls()
    b.call("AllReduce", b.op("Neg", b.input((4,))), reduce="sum")
    b.call("Send", b.op("Neg", b.input((4,))), peer=1, tag=0)
    step = b.step()
    facts = fuse_collectives(step, FusionOptions()).figures
    assert whys(dict(facts)) == ["pairwise call"]


def test_a_fused_call_stands_where_its_last_input_is_ready():
    """What the forward computes behind it runs beside the call."""
    b = Calls()
    for _ in range(2):
        b.call("AllReduce", b.op("Neg", b.input((4, 4))), reduce="sum")
    x = b.input((4, 4))
    for _ in range(3):
        x = b.op("MatMul", x, x)
    step, _ = fused(b.step())
    assert [node.op_type for node in step.graph.nodes].index("AllReduce") == 2


def packed_reduce(shown: bool, more: bool) -> SpmdProgram:
    """A Reduce of two tensors and a Broadcast of both; ``shown``: the step shows one result of the Reduce as well;
    ``more``: the Broadcast sends a third tensor."""
    b = Calls()
    names = [b.call("Reduce", b.input((4,)), reduce="sum", root=1) for _ in range(2)]
    other = b.op("Neg", b.input((4,)))
    outs = [b.broadcast(name, root=1) for name in [*names, *[other] * more]]
    step = b.step([names[1]] * shown)
    both, rest = [], []
    for kind in ("Reduce", "Broadcast"):
        found = [node for node in step.graph.nodes if node.op_type == kind]
        found[0].inputs = [name for node in found for name in node.inputs]
        found[0].outputs = [name for node in found for name in node.outputs]
        if kind == "Broadcast":
            found[0].attributes["shapes"] = ["4"] * len(outs)
        found[0].proto = None
        both.append(found[0])
        rest += found[1:]
    step.graph.nodes = [node for node in step.graph.nodes if node not in rest and node not in both] + both
    return step


@pytest.mark.parametrize(
    ("shown", "more", "left"),
    [(False, False, ["AllReduce"]), (True, False, ["Reduce", "Broadcast"]), (False, True, ["Reduce", "Broadcast"])],
)
def test_a_reduce_whose_results_are_needed_otherwise_stays(shown, more, left):
    """By the step's user, or beside another tensor in the broadcast."""
    step = packed_reduce(shown, more)
    outputs = dict(step.graph.outputs)
    facts = fuse_collectives(step, FusionOptions()).figures
    assert [node.op_type for node in calls(step)] == left
    assert facts["reduce_broadcast"] == (left == ["AllReduce"])
    made = {name for node in step.graph.nodes for name in node.outputs}
    assert step.graph.outputs == outputs and made >= outputs.keys()


def test_an_operator_of_another_domain_is_no_call():
    b = Calls()
    own = b.op("Reduce", b.input((4,)), domain="my", group="shard", reduce="sum", root=1)
    b.broadcast(own, root=1)
    step = b.step()
    facts = fuse_collectives(step, FusionOptions()).figures
    assert facts["reduce_broadcast"] == 0 and [node.op_type for node in step.graph.nodes] == ["Reduce", "Broadcast"]


def test_calls_of_other_passes_are_not_reported_as_the_sources():
    """The report lists nodes of the source that are gone."""
    for by in ("", "shard"):
        b = Calls()
        for _ in range(2):
            b.op("Neg", b.broadcast(b.call("Reduce", b.input((4,)), reduce="mean", root=1), root=1))
        step = b.step()
        for node in calls(step):
            node.made_by, node.proto = by, None if by else node.proto
        change = fuse_collectives(step, FusionOptions())
        assert len(change.removed) == (0 if by else 4)


def test_a_broadcast_from_another_root_is_none():
    b = Calls()
    b.broadcast(b.call("Reduce", b.input((4,)), reduce="sum", root=1), root=0)
    step = b.step()
    facts = fuse_collectives(step, FusionOptions()).figures
    assert facts["reduce_broadcast"] == 0 and len(calls(step)) == 2


def locals_of(b: Calls, step: SpmdProgram, groups, cuts: tuple[int, ...]) -> None:
    """The rank's part of all-reduced values, one layout operator a group, and an elementwise reader of each."""
    from gopt.ir.graph import Node

    start = 0
    for number, names in enumerate(groups):
        starts, begin = [], start
        for name in names:
            starts.append(start)
            start += b.types[name].elements
        sizes = [b.types[name].elements for name in names]
        span = FlatShard(cuts, begin, start)
        part = f"part{number}"
        step.graph.types[part] = step.graph.types[f"{part}.neg"] = TensorType("float32", (None,))
        given = {"starts": starts, "sizes": sizes}
        step.graph.nodes += [
            Node("LocalSlice", names, [part], domain=SPMD, attributes=given, sharding=Sharding.along("shard", span)),
            Node("Neg", [part], [f"{part}.neg"], sharding=Sharding.along("shard", span)),
        ]
    joined = [f"part{number}.neg" for number in range(len(groups))]
    step.graph.types["shown"] = TensorType("float32", (None,))
    step.graph.nodes.append(Node("LocalConcat", joined, ["shown"], domain=SPMD, attributes={"group": "shard"}))
    step.graph.outputs = {"shown": step.graph.types["shown"]}


def chained(b: Calls, x: str, *steps: tuple[str, str]) -> str:
    """One call behind the other, each of a group and a reduction."""
    for group, reduce in steps:
        x = b.call("AllReduce", x, group=group, reduce=reduce)
    return x


@pytest.mark.parametrize(
    ("steps", "left"),
    [
        ((("tp", "sum"), ("cp", "sum")), ["cp+tp"]),
        ((("tp", "sum"), ("dp", "sum"), ("cp", "sum")), ["dp+tp", "cp"]),
        ((("tp", "sum"), ("cp", "mean")), ["tp", "cp"]),
        ((("tp", "sum"), ("tp", "sum")), ["tp", "tp"]),
    ],
)  # fmt: skip
def test_a_sum_over_one_axis_and_then_another_is_one_over_both(steps, left):
    b = Calls()
    b.op("Neg", chained(b, b.op("Neg", b.input((4,))), *steps))
    for node in b.nodes:
        node.made_by = "plant" if node.domain == COMM else ""
    step = b.step(mesh=Mesh((("dp", 2), ("cp", 2), ("tp", 2))))
    before = run(step)
    facts = dict(fuse_collectives(step, FusionOptions()).figures)
    assert [node.attributes["group"] for node in calls(step)] == left
    assert facts.get("reduce_reduce", 0) == len(steps) - len(left)
    for one, other in zip(before, run(step), strict=True):
        assert all(np.allclose(value, other[name], rtol=1e-5) for name, value in one.items())


def test_a_chain_that_stays_does_not_keep_the_next_one():
    b = Calls()
    first = b.call("AllReduce", b.op("Neg", b.input((4,))), group="tp", reduce="sum")
    b.op("Neg", first)
    b.op("Neg", b.call("AllReduce", first, group="cp", reduce="sum"))
    b.op("Neg", chained(b, b.op("Neg", b.input((6,))), ("tp", "sum"), ("cp", "sum")))
    for node in b.nodes:
        node.made_by = "plant" if node.domain == COMM else ""
    step = b.step(mesh=Mesh((("cp", 2), ("tp", 2))))
    assert fuse_collectives(step, FusionOptions(cap_mb=0)).figures["reduce_reduce"] == 1


def test_a_sum_that_is_read_before_it_goes_on_stays():
    b = Calls()
    first = b.call("AllReduce", b.op("Neg", b.input((4,))), group="tp", reduce="sum")
    b.op("Neg", first)
    b.op("Neg", b.call("AllReduce", first, group="cp", reduce="sum"))
    for node in b.nodes:
        node.made_by = "plant" if node.domain == COMM else ""
    step, _ = fused(b.step(mesh=Mesh((("cp", 2), ("tp", 2)))))
    assert [node.attributes["group"] for node in calls(step)] == ["tp", "cp"]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("classes", [1, 2])
def test_an_all_reduce_of_which_ranks_read_their_part_is_a_reduce_scatter(together, classes):
    b = Calls(members=3)
    xs = [b.input((size,)) for size in (5, 7, 4)]
    ys = [b.call("AllReduce", x, reduce="mean") for x in xs]
    step = b.step()
    if together:
        node = step.graph.nodes[0]
        node.inputs, node.outputs, node.proto = xs, ys, None
        del step.graph.nodes[1:]
    locals_of(b, step, [ys] if classes == 1 else [ys[:2], ys[2:]], (0, 6, 12, 16))
    step, facts = fused(step)
    assert [(node.op_type, node.attributes["cuts"]) for node in calls(step)] == [("ReduceScatter", [0, 6, 12, 16])]
    assert facts["reduce_slice"] == (1 if together else 3)


def test_a_value_that_is_also_read_whole_stays_all_reduced():
    b = Calls()
    y = b.call("AllReduce", b.input((4,)), reduce="mean")
    b.op("Neg", y)
    step = b.step()
    locals_of(b, step, [[y]], (0, 2, 4))
    step, facts = fused(step)
    assert [node.op_type for node in calls(step)] == ["AllReduce"] and facts["reduce_slice"] == 0


def test_a_call_of_which_another_result_is_read_whole_stays():
    """One call of two tensors: each rank reads its part of the first alone, and all of the second."""
    b = Calls()
    xs = [b.input((4,)), b.input((4,))]
    ys = [b.call("AllReduce", x, reduce="mean") for x in xs]
    b.op("Neg", ys[1])
    step = b.step()
    node = step.graph.nodes[0]
    node.inputs, node.outputs, node.proto = xs, ys, None
    del step.graph.nodes[1]
    whole = dict(step.graph.outputs)
    locals_of(b, step, [ys[:1]], (0, 2, 4))
    step.graph.outputs.update(whole)
    step, facts = fused(step)
    assert [node.op_type for node in calls(step)] == ["AllReduce"] and facts["reduce_slice"] == 0


def test_one_tensor_of_which_ranks_read_their_part_is_a_reduce_scatter():
    b = Calls()
    y = b.call("AllReduce", b.input((5,)), reduce="mean")
    step = b.step()
    locals_of(b, step, [[y]], (0, 3, 5))
    step, _ = fused(step)
    assert [(node.op_type, node.attributes["cuts"]) for node in calls(step)] == [("ReduceScatter", [0, 3, 5])]


def test_a_sum_over_two_axes_of_which_ranks_read_their_part():
    """The two sums become one over both axes, which hands all ranks the whole."""
    b = Calls()
    y = chained(b, b.input((4,)), ("tp", "sum"), ("shard", "sum"))
    for node in b.nodes:
        node.made_by = "plant"
    step = b.step(mesh=Mesh((("shard", 2), ("tp", 2))))
    locals_of(b, step, [[y]], (0, 2, 4))
    facts = fuse_collectives(step, FusionOptions()).figures
    assert [(node.op_type, node.attributes["group"]) for node in calls(step)] == [("AllReduce", "shard+tp")]
    assert facts["reduce_slice"] == 0
    run(step)


# --- random graphs --------------------------------------------------------------------------------------------------

CHOICES = ("Neg", "Add", "sum", "max", "dp", "pair", "Broadcast", "Broadcast1", "scatter", "gather", "late")


@st.composite
def graphs(draw) -> Calls:
    b = Calls()
    small, values = [], [b.input((4,)), b.input((4,))]
    for choice in draw(st.lists(st.sampled_from(CHOICES), min_size=4, max_size=16)):
        x = values[draw(st.integers(0, len(values) - 1))]
        if choice == "Add":
            values.append(b.op("Add", x, values[draw(st.integers(0, len(values) - 1))]))
        elif choice in ("sum", "max"):
            values.append(b.call("AllReduce", x, reduce=choice))
        elif choice == "dp":
            values.append(b.call("AllReduce", x, reduce="sum", group="dp"))
        elif choice == "pair":
            values.append(b.broadcast(b.call("Reduce", x, reduce="sum", root=1), root=1))
        elif choice.startswith("Broadcast"):
            values.append(b.broadcast(x, root=int(choice.endswith("1"))))
        elif choice == "scatter":
            small.append(b.scatter(x))
        elif choice == "gather" and small:
            values.append(b.gather(small[draw(st.integers(0, len(small) - 1))]))
        else:
            values.append(b.op("Neg", x, late=choice == "late"))
    return b


@settings(max_examples=60, deadline=None)
@given(graphs(), st.sampled_from([None, 0.0, 16 / MIB, 40 / MIB, 200 / MIB]), st.sampled_from([None, 1, 2, 3]))
def test_fusing_never_makes_a_cycle_and_never_changes_a_value(b, cap, count):
    step = b.step(mesh=Mesh((("dp", 2), ("shard", 2))))
    before = len(calls(step))
    step, facts = fused(step, cap_mb=cap, max_tensors=count)
    assert len(calls(step)) <= before
    assert len(facts["neighbours"]) == max(len(calls(step)) - 1, 0)
    assert all(row["why"] for row in facts["neighbours"])
    assert all(row["calls_after"] >= row["packing_bound"] for row in facts["keys"])


# --- whole steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp_adamw", "mlp_adamw_fp16_scaler"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_a_step_travel_together(name, ranks, tmp_path):
    items = [("shard", {"stage": 0, "bucket-mb": 0}), ("statistics", {}), ("fuse-collectives", {}), ("prune", {})]
    source = gopt.load(FIXTURES / f"{name}.onnx")
    sharded = gopt.shard(source, ranks, pipeline=build_pipeline(items))
    report = sharded.write(tmp_path / "out").to_json()
    facts = next(each for each in report["pipeline"] if each["name"] == "fuse-collectives")["facts"]
    means = [row for row in facts["keys"] if row["reduce"] == "mean"]
    assert sum(row["calls_before"] for row in means) == len(set(source.training.gradients.values()))
    assert all(row["calls_after"] == row["packing_bound"] for row in means)
    for row in report["ranks"]:
        assert row["bytes"]["gradients"] == sum(
            source.training.graph.types[name].nbytes for name in set(source.training.gradients.values())
        )
    result = Verifier(tmp_path / "out").run(steps=2, confirm=False)
    assert result.equal, result.to_json()


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "expected"),
    [
        ("gpt_adamw", "dp=2,tp=2", 0, ["tp 14", "dp 28"]),
        ("gpt_adamw", "shard=2,tp=2", 2, ["tp 14", "shard 15", "shard 13"]),
        ("gpt_adamw_clip_sched_fp16", "dp=2,tp=2", 0, ["tp 14", "dp 16", "dp 12", "tp 13"]),
        (
            "gpt_adamw_clip_sched_fp16", "shard=2,tp=2", 3,
            ["shard 12", "tp 14", "shard 4", "shard 11", "shard 1", "shard 14", "tp 13"],
        ),
        ("mlp_adamw_fp16_scaler", "dp=2,tp=2", 0, ["dp 4", "tp 3"]),
        ("gpt_adamw", "dp=2,cp=2,tp=2", 0, ["cp 14", "cp+tp 14", "dp 28"]),
    ],
)  # fmt: skip
def test_reductions_of_a_split_step_take_a_call_for_each_group_level_and_type(name, mesh, stage, expected):
    """Sums of the gradients of norms over tp, means over data axes behind them,
    then the scalars of all gradients: a norm or a flag over the axis that shares out states, then over tp."""
    options = {"shard": {"stage": stage}, "tensor-parallel": {"sequence": "gpt" in name}}
    made = gopt.shard(source(name), Mesh.parse(mesh), pipeline=build_pipeline(defaults=options))
    gradients = set(made.program.source.gradients.values())
    behind, found = set(), []
    for node in made.program.graph.nodes:
        if gradients.intersection(node.outputs) or any(name in behind for name in node.reads):
            behind.update(node.outputs)
            if node.op_type in ("AllReduce", "ReduceScatter") and node.domain == COMM:
                found.append(f"{node.attributes['group']} {len(node.inputs)}")
    assert found == expected


def test_a_group_of_one_leaves_no_call_and_takes_none_from_the_others():
    one = gopt.shard(source("mlp_adamw"), Mesh.parse("dp=1,tp=2"), stage=0)
    two = gopt.shard(source("mlp_adamw"), Mesh.parse("tp=2"), stage=0)
    kinds = [
        [(n.op_type, n.attributes["group"]) for n in each.program.graph.nodes if n.domain == COMM]
        for each in (one, two)
    ]
    assert kinds[0] == kinds[1] and {group for _, group in kinds[0]} == {"tp"}
    data = gopt.shard(source("mlp_adamw"), Mesh.parse("dp=2,tp=1"), stage=0)
    assert {n.attributes["group"] for n in data.program.graph.nodes if n.domain == COMM} == {"dp"}


def test_a_member_without_a_part_takes_part_in_every_call(tmp_path):
    """Two columns on three members: the last has nothing of the pair, and nothing of their gradients."""
    path = tmp_path / "step.onnx"
    path.write_bytes(build(Recipe(widths=(3, 2, 4), norm="sumsquare-chain")).SerializeToString())
    options = {"shard": {"stage": 0}, "tensor-parallel": {"parameters": "w0:dim1;b0:dim0;w1:dim0"}}
    pipeline = build_pipeline(defaults=options)
    gopt.shard(gopt.load(path), Mesh.parse("dp=2,tp=3"), pipeline=pipeline).write(tmp_path / "out")
    ranks = [load(tmp_path / "out" / f"rank_000{rank}.onnx", own=True) for rank in range(6)]
    lists = [
        [(n.op_type, n.attributes["group"], len(n.inputs)) for n in rank.nodes if n.domain == COMM] for rank in ranks
    ]
    assert all(each == lists[0] for each in lists) and {group for _, group, _ in lists[0]} == {"dp", "tp"}
    empty = [name for name, type in ranks[2].inputs.items() if 0 in type.dims]
    assert empty
    assert Verifier(tmp_path / "out").run(steps=2).equal


def test_bucket_mb_caps_both_passes(tmp_path):
    report = gopt.shard(gopt.load(FIXTURES / "mlp_adamw.onnx"), 2, stage=0, bucket_mb=0).report().to_json()
    options = {each["name"]: each["options"] for each in report["pipeline"]}
    assert options["shard"]["bucket_mb"] == 0 and options["fuse-collectives"]["cap_mb"] == 0
    facts = next(each for each in report["pipeline"] if each["name"] == "fuse-collectives")["facts"]
    assert facts["fused_calls"] == 0


def test_the_cap_follows_from_the_sizes():
    assert choose_cap([MIB] * 8) == MIB == default_cap(8 * MIB)
    # Pairs of 0.6 MiB do not fit into 1 MiB; at 1.25 MiB they do.
    sizes = [int(0.6 * MIB)] * 4
    cap = choose_cap(sizes)
    assert MIB < cap < 2 * MIB and next_fit(sizes, cap) == packing_bound(sizes, cap) == 2
    assert choose_cap([3 * MIB, MIB // 2, 3 * MIB, MIB // 2], MIB) == MIB
    assert choose_cap([]) == MIB and choose_cap([5, 5], 0) == 0


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 60))
def test_the_packing_bound_is_a_bound(sizes, cap):
    assert packing_bound(sizes, cap) <= next_fit(sizes, cap) <= len(sizes)
    assert choose_cap(sizes, cap) in range(cap, max(2 * cap, 1))
