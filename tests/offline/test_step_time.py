"""The time of a step: single nodes, their order beside calls, and what follows for whole steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import source
from small_graphs import parsed

from gopt.ir.graph import COMM, RECOMPUTE, Node
from gopt.offline.device import DEVICES, DeviceFigures
from gopt.offline.plan import PlanChoice, ShardSettings, choices, estimate_cost, split_program
from gopt.offline.plan_ranking import best, rank_choices
from gopt.offline.roofline import node_works
from gopt.offline.step_simulation import Prices, StepSimulation
from gopt.records.mesh import Mesh
from gopt.records.topology import Topology
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
        (node("A", "x", "a"), 3.0), (node("AllReduce", "a", "b", **shard), 0.0), (node("C", "a", "c"), 2.0),
        (node("AllReduce", "c", "d", **shard), 0.0), (node("AllReduce", "c", "e", **tp), 0.0),
        (node("D", "b", "f"), 1.0),
    )  # fmt: skip
    end, stream = run(*items, prices=Prices({"b": 5.0, "d": 2.0, "e": 4.0}))
    assert (end, stream.compute, stream.exposed) == (10.0, 6.0, 4.0)
    end, stream = run(*items, prices=Prices({"b": 5.0, "d": 2.0, "e": 4.0}, start=0.5))
    assert end == 10.5, "B's call is at 3.5-8.5 and the next behind it; the starts delay what they can"
    end, stream = run(*items, prices=Prices({"b": 5.0, "d": 2.0, "e": 4.0}, overlaps=False))
    assert (end, stream.exposed) == (3 + 5 + 2 + 2 + 4 + 1, 11.0), "nothing is computed during a call"


def test_a_call_waits_for_the_results_of_another():
    group = {"domain": COMM, "attributes": {"group": "shard"}}
    other = {"domain": COMM, "attributes": {"group": "dp"}}
    items = (
        (node("ReduceScatter", "x", "a", **group), 0.0), (node("AllReduce", "a", "b", **other), 0.0),
        (node("C", "x", "c"), 1.0), (node("D", "b", "d"), 1.0),
    )  # fmt: skip
    end, stream = run(*items, prices=Prices({"a": 2.0, "b": 3.0}))
    assert (end, stream.compute, stream.exposed) == (6.0, 2.0, 4.0)


def test_what_runs_again_is_told_apart():
    end, stream = run((node("A", "x", "a"), 1.0), (node("A", "x", "b", made_by=RECOMPUTE), 2.0), prices=Prices({}))
    assert (end, stream.compute, stream.recompute) == (3.0, 1.0, 2.0)


# --- whole steps ----------------------------------------------------------------------------------------------------


def timed(name: str, mesh: str, device: DeviceFigures, link: str, settings: ShardSettings) -> PlanChoice:
    grid = Mesh.parse(mesh)
    topology = Topology.parse(link, grid)
    return estimate_cost(split_program(source(name).training, grid, topology), settings, topology, device)


MESHES = [("gpt_adamw", "shard=4"), ("gpt_adamw", "shard=2,tp=2"), ("cnn_sgd", "dp=2,shard=2"), ("mlp_adamw", "tp=2")]


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_the_parts_add_up_to_the_step(name, mesh):
    for choice in choices(source(name).training, grid := Mesh.parse(mesh), topology=Topology.parse("1GB/s:5us", grid),
                          device=DEVICES["cpu"]):  # fmt: skip
        time = choice.time
        parts = time.compute + time.recompute + time.exposed + time.bubble + time.fixed
        assert time.seconds == pytest.approx(parts) and time.compute > 0
        assert time.fixed == DEVICES["cpu"].run + DEVICES["cpu"].step


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
    grid = Mesh.parse("shard=4")
    found = list(choices(source("gpt_adamw").training, grid, topology=Topology.parse("1GB/s:5us", grid), device=SLOW))
    rows = rank_choices(found, None)
    steps = [float(f"{row.choice.time.seconds:.3g}") for row in rows]
    assert steps == sorted(steps)
    assert rows[0].why.startswith("least time: ") and "% of the step is computation" in rows[0].why
    assert any("its operators take " in row.why for row in rows[1:])
    assert best(found, None).choice is rows[0].choice
    assert rows[0].to_json()["step"]["seconds"] == rows[0].choice.time.seconds
