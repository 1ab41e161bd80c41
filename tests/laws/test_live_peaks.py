"""The live bytes that a plan says are those of the files that are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import FIXTURES, last_reads
from products import part

import gopt
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.spmd.program import SpmdProgram
from gopt.spmd.step_memory import live
from gopt.spmd.traffic import calls_of

STEPS = sorted(
    file
    for folder in ("", "families", "real")
    for file in (FIXTURES / folder).glob("*.onnx")
    if file.stem not in ("mlp_ort_adamw", "dropout_mlp_random")  # sizes of a rank are open; other draws on each rank
)
MESHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dp=2", {"stage": 0}),
    ("shard=2", {"stage": 1}),
    ("shard=2", {"stage": 2}),
    ("shard=2", {"stage": 3}),
    ("shard=8", {"stage": 2}),
    ("shard=2", {"stage": 2, "accumulate": 2}),
    ("tp=2", {}),
    ("shard=2", {"stage": 2, "recompute": "full"}),
)
CASES = [(step, *choice) for step in STEPS for choice in MESHES if step.stem != "mlp_adamw_accum" or len(choice[1]) < 2]


@pytest.mark.parametrize(("step", "mesh", "options"), part(CASES, 24))
def test_a_plan_has_the_live_bytes_of_the_files(step: Path, mesh: str, options: dict[str, Any], tmp_path: Path):
    sharded = gopt.shard(step, mesh, prove=False, **options)
    sharded.write(tmp_path / "ranks")
    program = sharded.program
    planned = live(program, calls_of(program), program.mesh.coordinates(0)).peak
    measured = max(most_alive(load(str(file), own=True), program) for file in tmp_path.glob("ranks/rank_0000*.onnx"))
    assert abs(planned - measured) <= 0.05 * measured


@pytest.mark.slow
@pytest.mark.parametrize(("step", "mesh", "options"), CASES)
def test_a_plan_has_the_live_bytes_of_all_files(step, mesh, options, tmp_path):
    test_a_plan_has_the_live_bytes_of_the_files(step, mesh, options, tmp_path)


def most_alive(graph: Graph, program: SpmdProgram) -> int:
    """The most bytes alive at once in a file, in the order of the nodes: each value from its node to the last reader,
    an output to the end. New states and sums take the memory of the old ones, and a view the memory of its operand."""
    free = {state.output for state in program.states} | {*program.loop_carried.values()}
    free |= {name for item in program.accumulators for name in (item.added, item.output)}
    owner, last = last_reads(graph.nodes)
    alive: dict[str, int] = {}
    most = 0
    for number, node in enumerate(graph.nodes):
        alive.update((n, graph.types[n].nbytes) for n in node.outputs if n and n not in owner and n not in free)
        most = max(most, sum(alive.values()))
        for name in [name for name in alive if last.get(name, 0) <= number and name not in graph.outputs]:
            del alive[name]
    return most
