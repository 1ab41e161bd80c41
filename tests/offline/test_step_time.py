"""The time of a step: single nodes, their order beside calls, and what follows for whole steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import source
from products import spread
from small_graphs import parsed

import gopt
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, RECOMPUTE, Node
from gopt.offline.device import DEVICES, DeviceFigures
from gopt.offline.meshes import neighbours, weigh, weigh_meshes
from gopt.offline.plan import PlanChoice, estimate_cost, split_program
from gopt.offline.plan_ranking import best, rank_choices
from gopt.offline.plan_settings import ShardSettings
from gopt.offline.roofline import NOTHING, node_works
from gopt.offline.stage_time import scheduled
from gopt.offline.step_simulation import ComputeStream, Prices, StepSimulation
from gopt.offline.step_time import Machine, step_time, total
from gopt.offline.timed_search import TimedSearch
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology
from gopt.schedules.builders import build_schedule
from gopt.schedules.simulation import DEFAULT_SECONDS, bubble_formula
from gopt.spmd.local_sizes import LocalSizes

SLOW = DeviceFigures(name="slow", flops={"float32": 100.0}, bandwidth=10.0, launch=1.0)
FREE = DeviceFigures(name="free", flops={"float32": 1e30}, bandwidth=1e30, launch=0.0)
GRAPH = """g (float[4,8] x, float[8,2] w, int64[1] i) => (float[4,2] z, float[1,2] p) {
    y = MatMul(x, w)
    r = Relu(y)
    z = Add(r, y)
    v = Identity(w)
    p = Gather(v, i)
}"""


def seconds(device: DeviceFigures, tmp_path) -> list[float]:
    graph = parsed(GRAPH, tmp_path)
    works = node_works(graph.nodes, LocalSizes(graph), graph.outputs, device.fuse_from)
    return [work.seconds(device) for work in works]


def test_a_node_takes_its_start_and_the_longer_of_operations_and_bytes(tmp_path):
    bytes_ = [224, 64, 96, 0, 24]  # a gather reads the rows that it picks, and the indices
    bytes_[4] = 8 + 8 + 8
    assert seconds(SLOW, tmp_path) == pytest.approx([1 + 22.4, 1 + 6.4, 1 + 9.6, 0, 1 + 2.4])
    fast_memory = replace(SLOW, bandwidth=1e9)
    assert seconds(fast_memory, tmp_path) == pytest.approx([1 + 128 / 100, 1, 1, 0, 1])
    half = replace(SLOW, efficiency=0.5)
    assert seconds(half, tmp_path)[0] == pytest.approx(1 + 44.8)


def test_elementwise_neighbours_pass_over_memory_once(tmp_path):
    """Relu hands r on; Add reads y, which the product wrote, and writes the result."""
    assert seconds(replace(SLOW, fuse_from=8), tmp_path) == pytest.approx([23.4, 1 + 3.2, 6.4, 0, 3.4])
    assert seconds(replace(SLOW, fuse_from=9), tmp_path) == seconds(SLOW, tmp_path), "values are too small"
    faster = replace(SLOW, fuse_from=8, fused_bandwidth=20.0)
    assert seconds(faster, tmp_path) == pytest.approx([23.4, 1 + 1.6, 3.2, 0, 3.4]), "Relu and Add alone"


def test_products_read_transposed_operands_in_place(tmp_path):
    graph = parsed("""g (float[8,4] x, float[2,8] w, float[3,8,4] b) => (float[4,2] z, float[4,8] u, float[3,4,2] p) {
        xt = Transpose <perm = [1, 0]> (x)
        wt = Transpose <perm = [1, 0]> (w)
        z = MatMul(xt, wt)
        u = Relu(xt)
        bt = Transpose <perm = [0, 2, 1]> (b)
        bad = Transpose <perm = [2, 0, 1]> (b)
        turned = Transpose <perm = [1, 0, 2]> (bad)
        p = MatMul(bt, wt)
        q = MatMul(turned, wt)
    }""", tmp_path)  # fmt: skip
    works = node_works(graph.nodes, LocalSizes(graph), graph.outputs, None)
    free = {node.outputs[0] for node, work in zip(graph.nodes, works) if work == NOTHING}
    assert free == {"wt", "bt"}, "Relu reads xt; the others move more than the axes of matrices"


def node(op_type: str, reads: str, makes: str, **more) -> Node:
    made = Node(op_type, list(reads), [makes], **more)
    return made


def run(*items: tuple[Node, float], prices: Prices):
    timeline = StepSimulation(1, prices)
    timeline.run([item for item, _ in items], [time for _, time in items])
    end = timeline.finish()
    return end, timeline.streams[0]


def test_calls_run_beside_the_nodes_that_do_not_wait_for_them():
    """By hand: A 0-3; B's call 3-8 beside C 3-5; the second call of the same axis waits for the link, 8-10, the one of
    another axis does not, 5-9; D waits for the first until 8 and takes 1; the end waits for the link."""
    shard, tp = {"domain": COMM, "attributes": {"group": "shard"}}, {"domain": COMM, "attributes": {"group": "tp"}}
    items = (
        (node("A", "x", "a"), 3.0), (node("AllReduce", "a", "b", **shard), 5.0), (node("C", "a", "c"), 2.0),
        (node("AllReduce", "c", "d", **shard), 2.0), (node("AllReduce", "c", "e", **tp), 4.0),
        (node("D", "b", "f"), 1.0),
    )  # fmt: skip
    end, stream = run(*items, prices=Prices())
    assert (end, stream.compute, stream.exposed) == (10.0, 6.0, 4.0)
    end, stream = run(*items, prices=Prices(start=0.5))
    assert end == 10.5, "B's call is at 3.5-8.5 and the next behind it; the starts delay what they can"
    end, stream = run(*items, prices=Prices(overlaps=False))
    assert (end, stream.exposed) == (3 + 5 + 2 + 2 + 4 + 1, 11.0), "nothing is computed during a call"


def test_a_call_waits_for_the_results_of_another():
    group = {"domain": COMM, "attributes": {"group": "shard"}}
    other = {"domain": COMM, "attributes": {"group": "dp"}}
    items = (
        (node("ReduceScatter", "x", "a", **group), 2.0), (node("AllReduce", "a", "b", **other), 3.0),
        (node("C", "x", "c"), 1.0), (node("D", "b", "d"), 1.0),
    )  # fmt: skip
    end, stream = run(*items, prices=Prices())
    assert (end, stream.compute, stream.exposed) == (6.0, 2.0, 4.0)


def test_what_runs_again_is_told_apart():
    end, stream = run((node("A", "x", "a"), 1.0), (node("A", "x", "b", made_by=RECOMPUTE), 2.0), prices=Prices())
    assert (end, stream.compute, stream.recompute) == (3.0, 1.0, 2.0)


# --- whole steps ----------------------------------------------------------------------------------------------------


def timed(name: str, mesh: str, device: DeviceFigures, link: str, settings: ShardSettings) -> PlanChoice:
    grid = Mesh.parse(mesh)
    topology = Topology.parse(link, grid)
    return estimate_cost(split_program(source(name).training, grid, topology), settings, topology, device)


def searched(name: str, mesh: str, device: DeviceFigures, memory: int | None = None, **fixed) -> list[PlanChoice]:
    """All choices of one mesh."""
    search = TimedSearch(device, "1GB/s:5us", memory, fixed=ShardSettings(**fixed))
    return weigh(lambda _: source(name).training, Mesh.parse(mesh), search).choices


MESHES = [("gpt_adamw", "shard=4"), ("gpt_adamw", "shard=2,tp=2"), ("cnn_sgd", "dp=2,shard=2"), ("mlp_adamw", "tp=2")]


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_the_parts_add_up_to_the_step(name, mesh):
    for choice in searched(name, mesh, DEVICES["cpu"]):
        time = choice.time
        parts = time.compute + time.recompute + time.exposed + time.bubble + time.fixed
        assert time.seconds == pytest.approx(parts) and time.compute > 0
        starts = (time.fixed - DEVICES["cpu"].run - DEVICES["cpu"].step) / DEVICES["cpu"].segment
        assert starts == pytest.approx(round(starts)) and starts >= 1, "of the operators between two calls"


@pytest.mark.parametrize(("name", "mesh"), MESHES)
@pytest.mark.parametrize("stage", [0, 3])
def test_nothing_faster_takes_longer(name, mesh, stage):
    settings, cpu = ShardSettings(stage), DEVICES["cpu"]
    base = timed(name, mesh, cpu, "1GB/s:5us", settings).time
    assert (
        timed(name, mesh, replace(cpu, bandwidth=2 * cpu.bandwidth), "1GB/s:5us", settings).time.seconds < base.seconds
    )
    assert timed(name, mesh, replace(cpu, launch=cpu.launch / 2), "1GB/s:5us", settings).time.seconds < base.seconds
    assert timed(name, mesh, cpu, "2GB/s:5us", settings).time.exposed < base.exposed
    slow, fast = (timed(name, mesh, replace(cpu, adding=adding), "1GB/s:5us", settings).time for adding in (1e9, 1e10))
    assert slow.exposed > fast.exposed > base.exposed and slow.compute == base.compute
    assert timed(name, mesh, replace(cpu, overlaps=True), "1GB/s:5us", settings).time.seconds <= base.seconds
    assert timed(name, mesh, replace(cpu, fuse_from=None), "1GB/s:5us", settings).time.compute >= base.compute


def test_without_computation_and_latency_a_step_takes_the_bytes_it_sends():
    """All gradients go once around a ring of two: one call, no overlap with nodes that take no time."""
    choice = timed("mlp_adamw", "dp=2", FREE, "1kB/s", ShardSettings(0))
    assert choice.times is not None
    assert choice.time.seconds == pytest.approx(choice.times.total) == choice.time.exposed


def test_ranks_that_compute_a_batch_together_have_less_to_compute():
    device = replace(SLOW, launch=0.0)
    one, two = (timed("gpt_adamw", mesh, device, "1GB/s", ShardSettings(0)).time for mesh in ("dp=1", "tp=2"))
    assert 0.5 * one.compute < two.compute < 0.8 * one.compute


def test_the_rank_follows_the_step_and_is_explained():
    found = searched("gpt_adamw", "shard=4", SLOW)
    rows = rank_choices(found, None)
    steps = [float(f"{row.choice.time.seconds:.3g}") for row in rows]
    assert steps == sorted(steps)
    assert rows[0].why.startswith("least time: ") and "% of the step is computation" in rows[0].why
    assert any("its operators take " in row.why for row in rows[1:])
    assert best(found, None).choice is rows[0].choice
    assert rows[0].to_json()["step"]["seconds"] == rows[0].choice.time.seconds


# --- pipeline stages, micro-batches, recompute ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved:2"])
@pytest.mark.parametrize(("members", "count"), [(2, 4), (4, 8)])
def test_equal_stages_wait_as_the_formula_says(name, members, count):
    schedule = build_schedule(name, members, count)
    parts = {
        (kind, stage): ComputeStream(clock=seconds, compute=seconds)
        for kind, seconds in DEFAULT_SECONDS.items() for stage in range(schedule.stages)
    }  # fmt: skip
    time = total(scheduled(schedule, parts, {}), FREE)
    assert time.bubble / time.seconds == pytest.approx(float(bubble_formula(name, members, count)))
    slower = total(scheduled(schedule, parts, dict.fromkeys(parts, 0.5)), FREE)
    assert slower.seconds > time.seconds and slower.compute == time.compute


def test_stages_run_in_turn_without_micro_batches():
    """A batch passes all stages: two of them compute in turn, so that half of the time is waiting."""
    device = replace(SLOW, launch=0.0)
    one, two = (timed("mlp_adamw", mesh, device, "1000GB/s", ShardSettings(0)).time for mesh in ("dp=1", "pp=2"))
    assert two.seconds <= one.seconds * 1.01 and two.bubble == pytest.approx(two.seconds - two.compute, rel=1e-3)
    assert 0.3 * two.seconds < two.bubble < 0.6 * two.seconds


def test_more_micro_batches_wait_less_and_schedules_differ():
    found = searched("gpt_adamw", "pp=2,shard=2", SLOW)
    by = {(each.settings.stage, each.settings.schedule, each.settings.accumulate): each for each in found}
    shares = [by[2, "1f1b", count].time.bubble / by[2, "1f1b", count].time.seconds for count in (4, 8)]
    assert shares == sorted(shares, reverse=True)
    assert by[2, "zb-h1", 4].time.bubble < by[2, "1f1b", 4].time.bubble
    assert by[2, "gpipe", 8].live.peak > by[2, "1f1b", 8].live.peak, "gpipe keeps all micro-batches"
    assert by[1, "1f1b", 4].live.peak > by[2, "1f1b", 4].live.peak, "sums are whole at stage 1"
    assert {each.settings.schedule for each in found} == {"gpipe", "1f1b", "zb-h1", "zb-v", "interleaved:2"}
    assert {each.settings.accumulate for each in searched("gpt_adamw", "pp=2", SLOW, accumulate=3)} == {3}


def test_what_shares_passes_is_weighed_as_alone():
    for each in searched("mlp_adamw", "pp=2,shard=2", DEVICES["cpu"])[::5]:
        grid, topology = each.mesh, Topology.parse("1GB/s:5us", each.mesh)
        split = split_program(source("mlp_adamw").training, grid, topology, each.settings)
        assert estimate_cost(split, each.settings, topology, DEVICES["cpu"]) == each


def test_values_are_computed_again_only_where_nothing_fits():
    plain = searched("gpt_adamw", "shard=2", DEVICES["cpu"])
    assert not any(each.settings.recompute for each in plain) and all(each.time.recompute == 0 for each in plain)
    least = min(each.held for each in plain)
    again = [each for each in searched("gpt_adamw", "shard=2", DEVICES["cpu"], least - 1) if each.settings.recompute]
    assert again and all(each.time.recompute > 0 for each in again)
    row = best(searched("gpt_adamw", "shard=2", DEVICES["cpu"], least - 1), least - 1)
    assert row.choice.settings.recompute and row.choice.held < least


@pytest.mark.rest
@pytest.mark.parametrize(("name", "link"), spread(["gpt_adamw", "families/moe_adamw"], ["1000GB/s:0us", "1GB/s:5us"]))
def test_meshes_that_cannot_be_first_are_not_weighed(name, link):
    device = replace(DEVICES["h100"], fuse_from=None)
    found = weigh_meshes(lambda _: source(name).training, 8, TimedSearch(device, link), stages=True)
    assert "were not weighed" in found.remarks["other meshes"]
    assert {each.batches for each in found.choices} == {8}, "all read the same samples in a step"
    first = rank_choices(found.choices, None)[0].choice
    start = Mesh.parse("shard=8")
    near = {start, *neighbours(start, stages=True)}
    for mesh in near.union(*(neighbours(each, stages=True) for each in near)):
        search = TimedSearch(device, link, fixed=ShardSettings(accumulate=8 // mesh.data_ranks))
        try:
            choices = weigh(lambda _: source(name).training, mesh, search).choices
        except UnsupportedError:
            continue
        assert min(each.seconds for each in choices) >= first.seconds * 0.99, "no better mesh was left out"


def test_work_that_takes_long_is_divided_along_all_axes():
    """Meshes of every axis that the step has are outlined; their steps read the same samples."""
    slow = replace(DEVICES["h100"], flops={"float32": 1e9}, launch=0.0)
    found = weigh_meshes(
        lambda _: source("families/moe_adamw").training, 4, TimedSearch(slow, "1000GB/s:0us"), stages=True
    )
    axes = {axis for mesh in found.meshes for axis, size in mesh.axes if size > 1}
    assert axes >= {"shard", "tp", "ep", "cp", "sp"}
    assert {each.batches for each in found.choices} == {4}


def test_images_are_divided_where_that_computes_less():
    slow = replace(DEVICES["h100"], flops={"float32": 1e6}, launch=0.0)
    found = weigh_meshes(lambda _: source("cnn_sgd").training, 4, TimedSearch(slow, "1000GB/s:0us"))
    assert {axis for mesh in found.meshes for axis, size in mesh.axes if size > 1} >= {"shard", "tp", "h", "w"}


def test_the_best_row_of_tensor_parallelism_is_weighed_with_tokens_divided():
    rows = searched("gpt_adamw", "tp=2", DEVICES["cpu"])
    divided = [each for each in rows if each.settings.sequence]
    assert len(divided) == 1
    (alike,) = (row for row in rows if row.settings == replace(divided[0].settings, sequence=False))
    assert divided[0].live.peak < alike.live.peak
    assert not any(each.settings.sequence for each in searched("gpt_adamw", "dp=2", DEVICES["cpu"]))
    least = min(each.held for each in rows if not each.settings.sequence)
    top = best(searched("gpt_adamw", "tp=2", DEVICES["cpu"], least - 1), least - 1).choice
    assert top.settings.sequence and not top.settings.recompute, "no value is computed again where this fits"


def test_the_best_row_is_weighed_with_every_partition():
    found = searched("gpt_adamw", "shard=4", DEVICES["cpu"])
    assert {each.settings.partition for each in found} == {"flat", "rows", "whole"}
    assert {each.settings.partition for each in searched("gpt_adamw", "tp=2", DEVICES["cpu"])} == {"flat"}


# --- values on the host ---------------------------------------------------------------------------------------------


def test_copies_to_the_host_take_time_on_a_link_and_none_on_a_cpu():
    def timed(device, what):
        passes = {"offload": {"least": "1B"}} if what else {}
        program = gopt.shard(source("gpt_adamw"), "shard=2", offload=what, passes=passes).program
        machine = Machine(device, Topology.parse(device.link, program.mesh))
        facts = program.passes[-1].result.facts
        return step_time(program, machine, program.mesh.coordinates(0)), facts

    cpu, slow = DEVICES["cpu"], replace(DEVICES["h100"], host_link=1e6, efficiency=1.0)
    assert timed(cpu, None)[0] == timed(cpu, "states,activations")[0]
    plain = timed(slow, None)[0]
    for what in ("states", "activations"):
        time, facts = timed(slow, what)
        copied = facts.to_host + facts.to_device
        hidden = plain.compute if what == "activations" else 0.0  # an update waits for the gradient, and for the step
        assert 0.99 * copied / 1e6 - hidden <= time.exposed - plain.exposed <= 1.01 * copied / 1e6 + 1e-3
        assert time.seconds == pytest.approx(time.compute + time.recompute + time.exposed + time.bubble + time.fixed)


def test_where_nothing_fits_states_and_values_go_to_the_host():
    device = DEVICES["h100"]
    rows = searched("gpt_adamw", "shard=2", device, None)
    again = [
        row.held for row in searched("gpt_adamw", "shard=2", device, 1) if row.settings.offload is None
    ]  # fmt: skip
    least = min(again)
    away = [each for each in searched("gpt_adamw", "shard=2", device, least - 1) if each.settings.offload]
    assert rows and away and min(each.held for each in away) < least
    assert not any(each.settings.offload for each in searched("gpt_adamw", "shard=2", DEVICES["cpu"], 1))
