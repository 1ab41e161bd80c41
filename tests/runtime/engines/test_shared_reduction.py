"""Reductions in memory that ranks of one host share: the bits of the reference, and MPI's way where there is none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import calls, edit_rank, mpiexec
from onnx import ModelProto
from products import part
from recipes import Recipe
from test_run import LONG, command, mpi, processes, run, samples, train, written

from gopt.records.mesh import Mesh

WIDE = Recipe(widths=(3, 150, 160, 4))
"""Gradients large enough to be worth it."""
slow = pytest.mark.slow
WIDER = Recipe(widths=(3, 250, 200, 4))
"""As halves."""


def result(folder: Path, data: str, name: str, fault: str = "", how: Any = None) -> tuple[int, dict[str, bytes]]:
    """Calls in shared memory, and the states, of four steps with MPI; ``how``: the launcher."""
    ranks = json.loads((folder / "manifest.json").read_text())["ranks"]
    more = ["--checkpoint", str(folder.parent / name), "--json"]
    done = run(command(folder, data, 4, "--launch", str(len(ranks)), *more), fault) if how is None else how(more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["shared_calls"], stored(folder.parent / name)


def stored(checkpoints: Path) -> dict[str, bytes]:
    files = sorted((checkpoints / "step_00000004").glob("*.safetensors"))
    assert files
    return {path.name: path.read_bytes() for path in files}


@mpi
@pytest.mark.parametrize(
    ("mesh", "micro_steps", "recipe", "options", "count"),
    [
        pytest.param("shard=2", 1, WIDE, {"stage": 2}, 2, marks=slow),
        pytest.param("shard=3", 1, WIDE, {"stage": 2, "bucket_mb": 0}, 2, marks=slow),  # a bucket of one tensor
        pytest.param("shard=3", 1, WIDE, {"stage": 3}, 2, marks=slow),
        pytest.param("shard=3", 1, WIDE, {"stage": 1}, 2, marks=slow),
        pytest.param("dp=3", 1, WIDE, {"stage": 0}, 1, marks=slow),
        pytest.param(
            "dp=2,shard=2", 1, WIDE, {"stage": 2}, 2, marks=slow
        ),  # shard 0 lies at the front of the room, and is sent over dp
        pytest.param("dp=2,shard=2", 2, WIDE, {"stage": 3}, 1, marks=slow),
        ("shard=2", 1, WIDE, {"stage": 3, "bucket_mb": 0}, 3),  # gathered for the forward, and again for the backward
        pytest.param(
            "shard=2", 3, WIDE, {"stage": 2}, 1, marks=slow
        ),  # the phase that updates shows no call behind the reads of the other
        pytest.param("shard=3", 1, Recipe(widths=WIDER.widths, half=True), {"stage": 2}, 2, marks=slow),
        pytest.param("shard=3", 1, WIDER, {"stage": 2, "reduce_dtype": "bfloat16"}, 2, marks=slow),
    ],
)
def test_states_have_the_bits_of_threads(mesh, micro_steps, recipe, options, count, tmp_path):
    folder, data = written(tmp_path, mesh, micro_steps, recipe, **options), samples(tmp_path)
    train(folder, data, 4, checkpoint=tmp_path / "threads")
    assert result(folder, data, "mpi") == (count, stored(tmp_path / "threads"))


@pytest.mark.rest
@mpi
@pytest.mark.parametrize(
    ("mesh", "fault", "said"),
    [
        ("shard=2", "nothing", "43 of 43"),
        pytest.param("shard=3", "nothing", "43 of 43", marks=slow),
        pytest.param("dp=2,shard=2", "nothing", "43 of 43", marks=slow),
        pytest.param("shard=2", "allocate", "0 of 43", marks=slow),
        pytest.param("shard=2", "map", "0 of 43", marks=slow),
        pytest.param(
            "dp=2,shard=2", "map", "29 of 43", marks=slow
        ),  # the groups of the first rank that hold not the last
    ],
)
def test_every_reduction_while_ranks_are_late(mesh, fault, said, tmp_path):
    script = Path(__file__).with_name("shared_ranks.py")
    ranks = str(Mesh.parse(mesh).ranks)
    done = run([mpiexec(), "-n", ranks, sys.executable, str(script), mesh, fault])
    assert done.returncode == 0 and done.stdout.strip() == said, done.stderr[-3000:]


@pytest.mark.rest
@mpi
@pytest.mark.parametrize(("stage", "fault"), part([(2, "allocate"), (3, "map"), (2, "map"), (3, "allocate")], 1))
def test_a_rank_that_cannot_share_leaves_all_to_mpi(stage, fault, tmp_path):
    count = 1 if fault == "allocate" else 0  # the first rank has pages for a gather
    folder = written(tmp_path, recipe=WIDE, stage=stage)
    train(folder, "faulty_data:batches", 4, checkpoint=tmp_path / "threads")
    assert result(folder, "faulty_data:batches", "mpi", fault) == (count, stored(tmp_path / "threads"))


@mpi
@pytest.mark.parametrize(("micro_steps", "count"), [pytest.param(1, 4, marks=slow), pytest.param(3, 2, marks=slow)])
def test_calls_that_run_beside_the_graph(micro_steps, count, tmp_path):
    """Segments go on to write what later calls send, and what the same calls send in the next micro-step."""
    recipe = Recipe(widths=(3, 150, 160, 150, 4))
    folder = written(tmp_path, micro_steps=micro_steps, recipe=recipe, stage=2, bucket_mb=0)
    train(folder, "faulty_data:batches", 4, checkpoint=tmp_path / "threads")
    assert result(folder, "faulty_data:batches", "mpi", "beside") == (count, stored(tmp_path / "threads"))


@pytest.mark.rest
@mpi
@pytest.mark.parametrize("stage", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
def test_nobody_writes_what_a_late_rank_still_reads(stage, tmp_path, monkeypatch):
    """A gradient is sent before its parameter has been read for the last time. Without the order, it shows."""
    folder = written(tmp_path, recipe=WIDE, stage=stage, bucket_mb=0)
    train(folder, "faulty_data:batches", 4, checkpoint=tmp_path / "threads")
    right = stored(tmp_path / "threads")
    assert result(folder, "faulty_data:batches", "mpi", "late") == (3 if stage == 3 else 2, right)
    if stage == 2:  # a busy machine may make the other rank late as well: this one is later from turn to turn
        for turn in range(7):
            monkeypatch.setenv("LATE", str(0.05 * 2**turn))
            if result(folder, "faulty_data:batches", f"wrong {turn}", "unordered")[1] != right:
                return
        pytest.fail("without the order, nothing went wrong")


@mpi
@slow
@pytest.mark.parametrize(("hosts", "count"), [("localhost:3,127.0.0.1:1", 2), ("localhost:1,127.0.0.1:3", 0)])
def test_only_what_the_launcher_calls_one_node_is_shared(hosts, count, tmp_path):
    folder, data = written(tmp_path, "dp=2,shard=2", recipe=WIDE, stage=2), samples(tmp_path)
    train(folder, data, 4, checkpoint=tmp_path / "threads")
    start = [mpiexec(), "-launcher", "fork", "-hosts", hosts, "-n", "4", *command(folder, data, 4)]
    assert result(folder, data, "mpi", how=lambda more: run([*start, *more])) == (count, stored(tmp_path / "threads"))


@mpi
def test_only_what_mpi_calls_one_host_is_shared(tmp_path, monkeypatch):
    """Ranks that MPICH keeps apart, so that their bytes can be counted."""
    data = samples(tmp_path)
    monkeypatch.setenv("MPIR_CVAR_NOLOCAL", "1")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    pair = written(tmp_path, "shard=2", recipe=WIDE, stage=2)
    train(pair, data, 4, checkpoint=tmp_path / "pair")
    assert result(pair, data, "apart") == (0, stored(tmp_path / "pair"))


@mpi
def test_ranks_of_different_plans_are_told_so_before_they_share(tmp_path):
    folder = written(tmp_path, recipe=WIDE, stage=2)

    def summed(model: ModelProto) -> None:
        node = calls(model, "ReduceScatter")[0]
        node.attribute.remove(next(each for each in node.attribute if each.name == "reduce"))

    edit_rank(folder, 1, summed)
    done = run(command(folder, samples(tmp_path), 1, "--launch", "2", "--deadline", "120"))
    errors = [line for line in done.stderr.splitlines() if line.startswith("gopt: error:")]
    assert done.returncode == 5 and len(errors) == 1, done.stderr
    assert "ranks 0 and 1 differ at call 0 over shard: step: ReduceScatter" in errors[0]


@mpi
@pytest.mark.parametrize(("fault", "said"), [
    pytest.param("kill", "rank 1 was killed by SIGKILL in step 8", marks=slow),
    pytest.param(
        "stop", "rank 0, step 8, call 0: after 1.5 s, it still waits at call 0 (ReduceScatter over shard)", marks=slow),
    pytest.param(
        "sleep", "rank 0, step 8, call 0: after 1.5 s, it still waits at call 0 (ReduceScatter over shard)",
        marks=slow),
    pytest.param("raise", "rank 1, step 8: ValueError: a bad sample", marks=slow),
])  # fmt: skip
def test_a_fault_ends_the_job_in_one_line(fault, said, tmp_path):
    folder = written(tmp_path, recipe=WIDE, stage=2)
    done = run(command(folder, "faulty_data:batches", 500, "--launch", "2", "--deadline", "120"), fault)
    errors = [line for line in done.stderr.splitlines() if line.startswith("gopt: error:")]
    assert done.returncode == 5 and len(errors) == 1 and said in errors[0], done.stderr
    assert not processes(folder), "no orphan is left"


@mpi
def test_shared_memory_has_no_name_and_ends_with_its_ranks(tmp_path):
    folder, log = written(tmp_path, recipe=WIDE, stage=2), tmp_path / "log"
    arguments = command(folder, "faulty_data:batches", 10**6, "--launch", "2", "--log", str(log))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + LONG
        while not (log.is_file() and log.read_text().count("\n") > 5) and time.monotonic() < until:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        maps = {number: Path(f"/proc/{number}/maps").read_text() for number in processes(folder)}
        found = {number: re.findall(r"(/\S*gopt-[0-9a-f]{16}.*)", text) for number, text in maps.items()}
        ranks = [number for number, lines in found.items() if lines]
        assert len(ranks) == 2 and set(found[ranks[0]]) == set(found[ranks[1]]), "each sees both files"
        for line in (*found[ranks[0]], *found[ranks[1]]):
            assert re.fullmatch(r"/memfd:gopt-\w+ \(deleted\)", line), "none is in a folder"
        os.kill(ranks[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=LONG)
        assert process.returncode == 5 and "was killed by SIGKILL" in errors
        assert not processes(folder), "nobody is left who could hold them"
        assert not [path for path in Path("/dev/shm").glob("*") if "gopt" in path.name]
    finally:
        process.kill()
        for left in processes(folder):
            os.kill(left, signal.SIGKILL)
