"""``gopt run``: the same training on every engine and number of ranks; checkpoints; faults with real processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import accept, calls, edit_rank, job_code, mpiexec
from products import part
from recipes import Recipe, build

import gopt
from gopt.artifact.manifest_entries import InputKind
from gopt.artifact.safetensors_file import safetensors_chunks
from gopt.errors import GoptError, RunError
from gopt.ir.types import TensorType
from gopt.offline.merge import merge, reshard
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.runtime.engines import launch, launcher_folder
from gopt.runtime.engines.base import run_threads
from gopt.runtime.training.job import Job, Progress, read_manifest
from gopt.runtime.training.train import Trainer

LONG = 600.0
"""Seconds that nothing takes, on however busy a machine."""

mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")
RECIPE = Recipe(widths=(3, 6, 4), norm="sumsquare-chain", ema=True, lr_input=True)


def written(folder: Path, mesh: str = "shard=2", micro_steps: int = 1, recipe: Recipe = RECIPE, **options: Any) -> Path:
    path = folder / "step.onnx"
    path.write_bytes(build(recipe).SerializeToString())
    given = {key.replace("_", "-"): value for key, value in options.items()}
    pipeline = build_pipeline(defaults={"shard": given})
    out = folder / f"{mesh}-{micro_steps}-{len(options)}.ranks"
    gopt.shard(gopt.load(path), Mesh.parse(mesh), accumulate=micro_steps, pipeline=pipeline).write(out)
    return out


def samples(folder: Path, count: int = 48) -> str:
    generator = np.random.default_rng(0)
    path = folder / "data.npz"
    np.savez(path, x=generator.standard_normal((count, 3)).astype("f4"), y=generator.standard_normal((count, 4)))
    return str(path)


def settings(folder: Path) -> dict[str, str]:
    manifest, _ = read_manifest(folder)
    return {each.name: "0.05" for each in manifest.inputs_of(InputKind.HYPER)}


def train(folder: Path, data: str, steps: int, **options: Any) -> list[Progress]:
    _, mesh = read_manifest(folder)
    job = Job(folder=folder, data=data, steps=steps, settings=settings(folder), **options)
    told: list[Progress] = []
    run_threads(mesh, 120.0, lambda engine: Trainer(job, engine, lambda step, call: None).run(told.append))
    return told


def values(checkpoint: Path, folder: Path) -> dict[str, np.ndarray]:
    target = folder / f"{checkpoint.parent.name}-{checkpoint.name}.onnx"
    merge(checkpoint, target, force=True)
    training = gopt.load(target).training
    return {state.tensor: np.array(training.graph.initializers[state.tensor].numpy()) for state in training.states}


def command(folder: Path, data: str, steps: int, *more: str) -> list[str]:
    known = {name: value for name, value in settings(folder).items() if not any(e.startswith(f"{name}=") for e in more)}
    given = [part for name, value in known.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "gopt.cli", "run", str(folder), "--data", data, "--steps", str(steps), *given, *more]


def run(arguments: list[str], fault: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FAULT": fault, "PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=LONG, **options)


# --- the same training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "micro_steps", "options"),
    [
        ("shard=2", 1, {"stage": 3, "bucket_mb": 0}),
        ("shard=4", 1, {"stage": 1}),
        ("dp=2,shard=2", 1, {"stage": 2, "partition": "whole", "style": "broadcast"}),
        ("shard=2", 2, {"stage": 2}),
        ("dp=2", 2, {"stage": 0}),
    ],
)
def test_any_ranks_train_alike(mesh, micro_steps, options, tmp_path):
    """The same samples a step, on one rank in micro-steps or on several: states and losses agree."""
    data = samples(tmp_path)
    several = written(tmp_path, mesh, micro_steps, **options)
    parts = Mesh.parse(mesh).ranks * micro_steps
    alone = written(tmp_path, "shard=1", parts)
    losses = [
        [each.loss for each in train(folder, data, 6, checkpoint=tmp_path / name)]
        for folder, name in ((alone, "a"), (several, "b"))
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    first = values(tmp_path / "a" / "step_00000006", tmp_path)
    second = values(tmp_path / "b" / "step_00000006", tmp_path)
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=2e-4, atol=2e-6, err_msg=name)


def test_the_loss_falls_and_is_told(tmp_path):
    told = train(written(tmp_path), samples(tmp_path, 8), 60)
    assert [each.step for each in told] == list(range(1, 61))
    assert told[-1].loss < 0.7 * told[0].loss
    assert all(len(each.losses) == 2 and each.samples == 8 and each.seconds > 0 for each in told)


@mpi
@pytest.mark.parametrize(
    ("mesh", "stage", "hosts"),
    part(
        [
            ("dp=2,shard=2", 3, ""),
            ("shard=2", 1, ""),
            ("dp=2,shard=2", 2, "localhost:3,127.0.0.1:1"),
            ("shard=2", 3, ""),
        ],
        1,
        first=1,
    ),
)
def test_mpi_trains_as_threads_do(mesh, stage, hosts, tmp_path):
    """``hosts``: nodes to the launcher, which share no memory and talk over TCP."""
    folder, data = written(tmp_path, mesh, stage=stage, bucket_mb=0), samples(tmp_path)
    train(folder, data, 5, checkpoint=tmp_path / "threads")
    ranks = str(Mesh.parse(mesh).ranks)
    given = ["--checkpoint", str(tmp_path / "mpi"), "--json"]
    if hosts:
        launcher = [mpiexec(), "-launcher", "fork", "-hosts", hosts, "-n", ranks]
        done = run([*launcher, *command(folder, data, 5, *given)])
    else:
        done = run(command(folder, data, 5, "--launch", ranks, *given))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engine"] == "mpi"
    first, second = (values(tmp_path / name / "step_00000005", tmp_path) for name in ("threads", "mpi"))
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


KINDS = [
    {"stage": 2, "partition": "whole", "style": "broadcast"},
    {"stage": 0},
    {"stage": 1, "reduce_dtype": "bfloat16"},
]


@mpi
@pytest.mark.parametrize(("options", "half"), part(itertools.product(KINDS, [True, False]), 1))
def test_every_kind_of_call_over_mpi(options, half, tmp_path):
    """Broadcasts and reduces by owner, packed calls, finite checks, halves: against threads."""
    recipe = Recipe(widths=(3, 6, 4), half=half, loss_scale=True, check="max-below-inf", norm="abs-max")
    folder, data = written(tmp_path, recipe=recipe, **options), samples(tmp_path)
    train(folder, data, 3, checkpoint=tmp_path / "threads")
    done = run(command(folder, data, 3, "--launch", "2", "--checkpoint", str(tmp_path / "mpi")))
    assert done.returncode == 0, done.stderr
    first, second = (values(tmp_path / name / "step_00000003", tmp_path) for name in ("threads", "mpi"))
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, rtol=2e-2, atol=1e-4, err_msg=name)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", ["shard=3", "dp=2,shard=2"])
def test_a_resumed_run_is_the_same_bit_for_bit(mesh, tmp_path):
    folder, data = written(tmp_path, mesh), samples(tmp_path)
    whole = train(folder, data, 9, checkpoint=tmp_path / "whole", shuffle=3)
    train(folder, data, 4, checkpoint=tmp_path / "parts", shuffle=3)
    rest = train(folder, data, 9, checkpoint=tmp_path / "parts", resume=True, shuffle=3)
    assert [each.losses for each in rest] == [each.losses for each in whole[4:]]
    for path in sorted((tmp_path / "whole" / "step_00000009").glob("rank_*")):
        assert path.read_bytes() == (tmp_path / "parts" / "step_00000009" / path.name).read_bytes()


def test_a_checkpoint_goes_on_with_other_ranks(tmp_path):
    folder, data = written(tmp_path, "shard=3", stage=3), samples(tmp_path)
    train(folder, data, 4, checkpoint=tmp_path / "a")
    checkpoint = tmp_path / "a" / "step_00000004"
    reshard(checkpoint, Mesh.parse("dp=2,shard=2"), options={"shard": {"stage": 1}}).write(tmp_path / "b.ranks")
    merge(tmp_path / "b.ranks", tmp_path / "b.onnx")
    merge(checkpoint, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    assert len(train(tmp_path / "b.ranks", data, 2)) == 2


def test_only_some_checkpoints_stay(tmp_path):
    train(written(tmp_path), samples(tmp_path), 9, checkpoint=tmp_path / "c", every=2, keep=3)
    steps = sorted(path.name for path in (tmp_path / "c").iterdir() if path.is_dir())
    assert steps == ["step_00000006", "step_00000008", "step_00000009"]


def test_checkpoints_of_an_earlier_run_are_not_mixed_with(tmp_path):
    folder, data = written(tmp_path), samples(tmp_path)
    train(folder, data, 4, checkpoint=tmp_path / "c")
    with pytest.raises(GoptError, match="holds checkpoints of an earlier run, up to step 4"):
        train(folder, data, 2, checkpoint=tmp_path / "c")
    train(folder, data, 5, checkpoint=tmp_path / "c", resume=True)


def test_the_launcher_finds_gopt_in_its_own_checkout(tmp_path):
    """There the folder gopt/ would hide the installed package."""
    done = run([sys.executable, "-P", "-m", "gopt.cli", "--version"], cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_that_was_cut_short_does_not_count(tmp_path):
    folder, data = written(tmp_path), samples(tmp_path)
    train(folder, data, 4, checkpoint=tmp_path / "c", every=2)
    (tmp_path / "c" / "step_00000004" / "index.json").unlink()
    told = train(folder, data, 5, checkpoint=tmp_path / "c", resume=True)
    assert [each.step for each in told] == [3, 4, 5]


def spoil(victim: Path, damage: str) -> None:
    if damage == "bits":
        raw = bytearray(victim.read_bytes())
        raw[-1] ^= 1
        victim.write_bytes(raw)
    elif damage == "short":
        victim.write_bytes(victim.read_bytes()[:-4])
    else:
        victim.unlink()


@pytest.mark.parametrize("damage", ["bits", "short", "missing", "index", "others"])
def test_a_damaged_checkpoint_is_named(damage, tmp_path):
    folder, data = written(tmp_path), samples(tmp_path)
    train(folder, data, 2, checkpoint=tmp_path / "c")
    step = tmp_path / "c" / "step_00000002"
    victim = step / "rank_0001.safetensors"
    if damage in ("bits", "short", "missing"):
        spoil(victim, damage)
    elif damage == "index":
        (step / "index.json").write_text("{")
    else:
        folder = written(tmp_path, "shard=3")
    with pytest.raises(RunError, match="checkpoint"):
        train(folder, data, 3, checkpoint=tmp_path / "c", resume=True)


@pytest.mark.parametrize("damage", ["bits", "short", "missing", "index", "empty index", "no entry"])
def test_values_of_a_damaged_checkpoint_are_not_taken(damage, tmp_path):
    folder = written(tmp_path)
    train(folder, samples(tmp_path), 2, checkpoint=tmp_path / "c")
    step = tmp_path / "c" / "step_00000002"
    assert values(step, tmp_path)
    for path in tmp_path.glob("c-*.onnx"):
        path.unlink()
    victim, index = step / "rank_0001.safetensors", step / "index.json"
    if damage in ("bits", "short", "missing"):
        spoil(victim, damage)
    else:
        whole = json.loads(index.read_text())
        whole["files"].pop(victim.name)
        index.write_text({"index": "{", "empty index": ""}.get(damage, json.dumps(whole)))
    for work in (lambda: merge(step, tmp_path / "m.onnx"), lambda: reshard(step, Mesh.parse("shard=3"))):
        with pytest.raises(RunError, match="checkpoint"):
            work()
    assert not (tmp_path / "m.onnx").exists()


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    folder, data = written(tmp_path), samples(tmp_path)
    train(folder, data, 2, checkpoint=tmp_path / "c")
    kept = {path.name: path.read_bytes() for path in (tmp_path / "c" / "step_00000002").iterdir()}
    real = os.fsync

    def full(number: int) -> None:
        if "/.step_" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        train(folder, data, 4, checkpoint=tmp_path / "c", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "c" / "step_00000002").iterdir()} == kept
    monkeypatch.undo()
    assert not [path for path in (tmp_path / "c").iterdir() if ".new" in path.name]
    train(folder, data, 4, checkpoint=tmp_path / "c", resume=True)


# --- agreement ------------------------------------------------------------------------------------------------------


def test_ranks_of_different_plans_do_not_start(tmp_path):
    folder = written(tmp_path, stage=1)

    def summed(model: Any) -> None:
        node = calls(model, "ReduceScatter")[0]
        node.attribute.remove(next(each for each in node.attribute if each.name == "reduce"))

    edit_rank(folder, 1, summed)
    with pytest.raises(GoptError) as caught:
        train(folder, samples(tmp_path), 1)
    assert "call" in caught.value.message and "ReduceScatter" in caught.value.message


def test_ranks_that_start_apart_are_told_so(tmp_path):
    folder, data = written(tmp_path, stage=1), samples(tmp_path)
    raw = bytearray((folder / "states.bin").read_bytes())
    shutil.copytree(folder, tmp_path / "other.ranks")
    raw[3] ^= 64
    (tmp_path / "other.ranks" / "states.bin").write_bytes(raw)
    accept(tmp_path / "other.ranks")
    _, mesh = read_manifest(folder)

    def jobs(sync: str | None) -> list[Job]:
        common = {"data": data, "steps": 2, "settings": settings(folder), "sync_init": sync}
        return [Job(folder=each, **common) for each in (folder, tmp_path / "other.ranks")]

    def work(sync: str | None) -> Any:
        return run_threads(mesh, 5.0, lambda e: Trainer(jobs(sync)[e.rank], e, lambda s, c: None).run(lambda p: None))

    with pytest.raises(RunError, match="start with different values"):
        work(None)
    work("all")
    work("shard")


@mpi
def test_processes_that_start_apart_are_told_so_unless_the_first_gives_its_values(tmp_path):
    folder, data = written(tmp_path, "dp=2", stage=0), samples(tmp_path)
    shutil.copytree(folder, tmp_path / "other.ranks")
    raw = bytearray((folder / "states.bin").read_bytes())
    raw[3] ^= 64
    (tmp_path / "other.ranks" / "states.bin").write_bytes(raw)
    accept(tmp_path / "other.ranks")
    own, other = command(folder, data, 1), command(tmp_path / "other.ranks", data, 1)

    def work(*more: str) -> subprocess.CompletedProcess[str]:
        return run([mpiexec(), "-n", "1", *own, *more, ":", "-n", "1", *other, *more])

    done = work()
    assert job_code(done) == 5 and "rank 1 and rank 0 start with different values of" in done.stderr
    assert work("--sync-init", "dp").returncode == 0


# --- faults ---------------------------------------------------------------------------------------------------------


@mpi
@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("kill", 5, "rank 1 was killed by SIGKILL in step 8"),
        pytest.param(
            "stop",
            5,
            "over shard): rank 1 did not reach this call: its process is stopped, in step 8",
            marks=pytest.mark.slow,
        ),
        pytest.param("sleep", 5, "rank 1 did not reach this call: it is in step 8", marks=pytest.mark.slow),
        pytest.param("raise", 5, "rank 1, step 8: ValueError: a bad sample", marks=pytest.mark.slow),
        pytest.param("nan", 5, "the loss is nan", marks=pytest.mark.slow),
        pytest.param("end", 3, "rank 1, step 8: the data ended", marks=pytest.mark.slow),
        pytest.param("exit", 5, "rank 1, step 8: SystemExit: 3", marks=pytest.mark.slow),
        pytest.param("all", 5, "step 8: ValueError: a bad sample", marks=pytest.mark.slow),
    ],
)
def test_a_fault_ends_the_job_in_one_line(fault, code, said, tmp_path, capsys):
    folder = written(tmp_path)
    kept = ["--checkpoint", str(tmp_path / "c"), "--every", "3"]
    more = ["--launch", "2", "--deadline", "120", "--stop-on-nan", *kept]
    done = run(command(folder, "faulty_data:batches", 500, *more), fault)
    assert done.returncode == code, (done.returncode, done.stderr)
    errors = [line for line in done.stderr.splitlines() if line.startswith("gopt: error:")]
    assert len(errors) == 1 and said in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert not processes(folder), "no orphan is left"
    steps = sorted(path.name for path in (tmp_path / "c").iterdir() if path.name.startswith("step_"))
    assert steps[-1] == "step_00000006"
    again = command(folder, "faulty_data:batches", 9, "--checkpoint", str(tmp_path / "c"), "--resume", "--json")
    assert main(again[3:]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


@pytest.mark.parametrize("more", [(), pytest.param(("--launch", "2"), marks=[mpi, pytest.mark.slow])])
def test_a_data_file_that_is_truncated_meanwhile_is_named(more, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    arrays = {"x": random.standard_normal((4096, 3), "f4"), "y": random.standard_normal((4096, 4), "f4")}
    path = tmp_path / "data.safetensors"
    types = {name: TensorType("float32", array.shape) for name, array in arrays.items()}
    path.write_bytes(b"".join(safetensors_chunks(types, arrays.values())))
    monkeypatch.setenv("TRUNCATE", str(path))
    folder, kept = written(tmp_path), tmp_path / "c"
    rate = ("--set", "lr=faulty_data:truncating", "--checkpoint", str(kept), "--every", "1")
    done = run(command(folder, str(path), 500, *rate, *more))
    errors = [line for line in done.stderr.splitlines() if line.startswith("gopt: error:")]
    assert done.returncode == 5 and len(errors) == 1, (done.returncode, done.stderr)
    assert "step 3: " in errors[0] and f"{path} was truncated while it is read: it has 300 bytes" in errors[0]
    assert values(kept / "step_00000002", tmp_path)


@mpi
def test_ranks_that_are_killed_leave_no_memory_behind():
    """MPICH's own file of a job, 2 MiB, stays in /dev/shm when the job is not ended in order; its name goes before."""
    code = (
        "from gopt.records.mesh import Mesh\nfrom gopt.runtime.engines.mpi import MpiEngine\n"
        "engine = MpiEngine(Mesh.parse('shard=2'), 120.0, print)\nengine.gather(0)\n"
        "named = [line for line in open('/proc/self/maps') if '/dev/shm/' in line]\n"
        "found = engine.gather((bool(named), [line for line in named if '(deleted)' not in line]))\n"
        "if engine.rank == 0: print(found)"
    )
    done = run([mpiexec(), "-n", "2", sys.executable, "-c", code])
    assert done.stdout == "[(True, []), (True, [])]\n", done.stderr


@mpi
@pytest.mark.parametrize("number", part([signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGKILL], 1, first=2))
def test_the_ranks_end_with_their_launcher(number, tmp_path):
    folder, log = written(tmp_path), tmp_path / "log"
    (tmp_path / "tmp").mkdir()
    path = {"PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path / "tmp")}
    arguments = command(folder, "faulty_data:batches", 10**6, "--launch", "2", "--log", str(log))
    process = subprocess.Popen(arguments, env={**os.environ, **path}, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + LONG
        while not (log.is_file() and log.read_text().count("\n") > 5) and time.monotonic() < until:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        assert len(processes(folder)) > 2, "it trains"
        process.send_signal(number)
        _, errors = process.communicate(timeout=LONG)  # ends when nobody holds the stream any more
        assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
        if number in (signal.SIGTERM, signal.SIGHUP):
            assert errors == f"gopt: error: stopped by {number.name}\n"
        until = time.monotonic() + LONG
        while processes(folder) and time.monotonic() < until:
            time.sleep(0.05)
        assert not processes(folder), "no orphan is left"
        assert not list((tmp_path / "tmp").glob("gopt.*")), "nor its folder"
    finally:
        process.kill()
        for left in processes(folder):
            os.kill(left, signal.SIGKILL)


def processes(folder: Path) -> dict[int, str]:
    """Living processes that run this folder: number -> command line."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            try:
                text = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                alive = (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
            if str(folder) in text and alive:
                found[int(path.name)] = text
    return found


@pytest.mark.parametrize("fault", part(["raise", "nan", "end", "exit"], 2))
def test_a_fault_of_a_thread_ends_all_of_them(fault, tmp_path):
    folder = written(tmp_path)
    done = run(command(folder, "faulty_data:batches", 50, "--deadline", "120", "--stop-on-nan"), fault)
    assert done.returncode == (3 if fault == "end" else 5)
    assert "rank 1, step 8" in done.stderr and done.stderr.count("gopt: error:") == 1


@pytest.mark.rest
def test_a_thread_that_hangs_is_left_behind(tmp_path):
    done = run(command(written(tmp_path), "faulty_data:batches", 50, "--deadline", "10"), "sleep")
    assert done.returncode == 5 and "after 10 s, rank 0 still waits for rank 1" in done.stderr, done.stderr


LEFT = [("--log", False), ("--trace", False), ("--checkpoint", True), ("--trace", True)]


@pytest.mark.parametrize(
    ("option", "launched"),
    [
        ("--checkpoint", False),
        pytest.param("--log", True, marks=mpi),
        *(pytest.param(*each, marks=[mpi, pytest.mark.slow]) for each in LEFT),
    ],
)
def test_what_cannot_be_written_is_told_before_the_first_step(option, launched, tmp_path):
    (tmp_path / "file").write_text("")
    more = ["--launch", "2"] if launched else []
    done = run(command(written(tmp_path), "faulty_data:batches", 10**6, *more, option, str(tmp_path / "file" / "a")))
    errors = [line for line in done.stderr.splitlines() if line.startswith("gopt: error:")]
    assert done.returncode == 5 and len(errors) == 1 and "cannot write" in errors[0], done.stderr


@mpi
def test_ranks_and_launcher_must_agree(tmp_path):
    folder = written(tmp_path)
    done = run(command(folder, "faulty_data:batches", 2, "--launch", "3"))
    assert done.returncode == 2 and "holds 2 ranks" in done.stderr


@mpi
@pytest.mark.parametrize(
    ("where", "data", "ranks", "code", "said"),
    [
        ("nowhere", "faulty_data:batches", 2, 3, "not an output folder"),
        pytest.param(
            "", "faulty_data:batches", 3, 2, "the launcher started 3 ranks, the folder holds 2", marks=pytest.mark.slow
        ),
        pytest.param("", "none.npz", 2, 3, "none.npz: no such file", marks=pytest.mark.slow),
        pytest.param("one file", "faulty_data:batches", 2, 5, "there is no file", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_users_launcher_say_it_once(where, data, ranks, code, said, tmp_path):
    folder = written(tmp_path)
    if where == "one file":
        next(folder.glob("*1.onnx")).unlink()
    target = tmp_path / where if where == "nowhere" else folder
    done = run([mpiexec(), "-n", str(ranks), *command(folder, data, 2)[:4], str(target), *command(folder, data, 2)[5:]])
    errors = [line for line in done.stderr.splitlines() if line.startswith("gopt: error:")]
    assert job_code(done) == code and len(errors) == 1 and said in errors[0], (done.returncode, done.stderr)


def test_ranks_that_never_begin_are_given_up(tmp_path, monkeypatch):
    stuck = [sys.executable, "-c", "import time; time.sleep(1000)", str(tmp_path)]
    monkeypatch.setattr(launch, "program", lambda arguments: stuck)
    monkeypatch.setattr(launch, "START", 0.3)
    with pytest.raises(RunError, match=r"after 0\.5 s, no rank has begun"):
        launch.launch(2, ["run"], 0.1, lambda line: None)
    assert not processes(tmp_path)


def test_the_code_is_that_of_the_rank_that_said_why(monkeypatch):
    """Others may end in any other way."""
    claim = f"${launch.HEARTBEATS}/{launcher_folder.ERROR_CLAIMED}"
    script = f'printf "3 1" > "{claim}.$$"; mv "{claim}.$$" "{claim}"; exit 9'
    monkeypatch.setattr(launch, "program", lambda arguments: ["sh", "-c", script])
    assert launch.launch(2, ["run"], 1.0, lambda line: None) == 3


@mpi
@pytest.mark.parametrize("more", [("--debug",), pytest.param((), marks=pytest.mark.slow)])
def test_the_reason_does_not_pass_through_what_ranks_print(tmp_path, monkeypatch, capfd, more):
    """A rank ends all others, and what it prints may come behind."""
    real = launch.program
    monkeypatch.setattr(launch, "program", lambda given: ["sh", "-c", 'exec "$@" 2>/dev/null', "sh", *real(given)])
    monkeypatch.setenv("FAULT", "raise")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    arguments = [*more, *command(written(tmp_path), "faulty_data:batches", 20)[3:], "--engine", "mpi"]
    assert launch.launch(2, arguments, 60.0, lambda line: None) == 5
    errors = capfd.readouterr().err
    assert errors.count("gopt: error: ") == 1 and "a bad sample" in errors, errors
    assert errors.startswith("Traceback" if more else "gopt: error: "), errors


@mpi
@pytest.mark.slow
def test_many_ranks_on_few_cores(tmp_path):
    folder = written(tmp_path, "shard=4")
    done = run(command(folder, "faulty_data:batches", 3, "--launch", "4", "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--resume"], 2, "--resume needs --checkpoint"),
        (["--every", "2"], 2, "--every needs --checkpoint"),
        (["--set", "nothing=1"], 2, "is not a hyper-parameter"),
        (["--engine", "threads", "--launch", "2"], 2, "--launch starts processes"),
        (["--shuffle", "1"], 2, "--shuffle needs samples on disk"),
        (["--shuffle", "-1"], 2, "-1 is not in the range"),
        *((["--deadline", text], 2, "--deadline") for text in ("inf", "nan", "0", "-1", "1e30")),
    ],
)
def test_requests_that_cannot_be(more, code, said, tmp_path, capsys):
    assert main(command(written(tmp_path), "faulty_data:batches", 2, *more)[3:]) == code
    assert said in capsys.readouterr().err


def test_missing_files_and_data_are_named(tmp_path):
    folder, data = written(tmp_path), samples(tmp_path)
    np.savez(tmp_path / "bad.npz", x=np.zeros((8, 5), "f4"), y=np.zeros((8, 4), "f4"))
    for text, said in ((str(tmp_path / "bad.npz"), "'x' has shape"), ("nowhere:f", "cannot find")):
        with pytest.raises(GoptError, match=said):
            train(folder, text, 1)
    (folder / "rank_0001.onnx").unlink()
    with pytest.raises(RunError, match="rank_0001"):
        train(folder, data, 1)


PROOF = [sys.executable, "-m", "gopt.cli", "verify", "--engine", "mpi", "--json", "--no-confirm"]


@mpi
@pytest.mark.parametrize(("mesh", "micro_steps"), part([("shard=2", 2), ("dp=2,shard=2", 2), ("pp=2", 4)], 1))
def test_the_proof_on_real_processes(mesh, micro_steps, tmp_path):
    done = run([*PROOF, "--steps", "1", str(written(tmp_path, mesh, micro_steps, stage=3))])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]


@mpi
@pytest.mark.slow
def test_the_proof_on_real_processes_sees_a_wrong_rank(tmp_path):
    wrong = written(tmp_path, "shard=2", stage=3)
    manifest = json.loads((wrong / "manifest.json").read_text())
    for state in manifest["ranks"][1]["state"]:
        state["pieces"].reverse()
    (wrong / "manifest.json").write_text(json.dumps(manifest))
    done = run([*PROOF, str(wrong)])
    assert done.returncode == 3 and done.stderr.count("gopt: error: rank ") == 1, done.stderr
    assert "manifest.json is not what gopt wrote" in done.stderr
    assert run([*PROOF, str(wrong), "--unchecked"]).returncode == 1
