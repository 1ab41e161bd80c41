"""CPU tuning changes no bit: fixtures are trained with and without it, and every loss and state compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import FIXTURES
from products import part
from recipes import Recipe
from test_run import command, mpi, run, samples, settings, train, values, written

import gopt
from gopt.artifact.manifest_entries import InputKind
from gopt.ir.types import numpy_dtype
from gopt.passes.pipeline import build_pipeline
from gopt.records.mesh import Mesh
from gopt.runtime.device import Host
from gopt.runtime.engines.base import run_threads
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.training.job import Job, Progress, read_manifest
from gopt.runtime.training.train import Trainer
from gopt.runtime.tuning import numpy_kernels, tiling
from gopt.runtime.tuning.tuning import CPU_TUNING, NO_TUNING, tuning_of
from gopt.verification.verify import Verifier

CASES = [
    ("mlp_adamw", "shard=2", 1, {"stage": 2}),
    ("mlp_adamw", "shard=3", 2, {"stage": 3}),
    ("mlp_lamb", "shard=2", 1, {"stage": 1}),
    ("mlp_muon", "shard=2", 1, {"stage": 2}),
    ("mlp_adamw_bf16", "shard=2", 1, {"stage": 3}),
    ("mlp_adamw_fp16_scaler", "dp=2,shard=2", 1, {"stage": 2}),
    ("gpt_adamw", "shard=2", 1, {"stage": 2}),
    ("gpt_adamw_clip_sched_fp16", "shard=2", 1, {"stage": 3}),
    ("emb_adamw", "dp=2", 1, {"stage": 0}),
    ("cnn_sgd", "shard=3", 1, {"stage": 2}),
]


def sharded(folder: Path, name: str, mesh: str, micro_steps: int, options: dict[str, Any]) -> Path:
    out, source = folder / "ranks", gopt.load(FIXTURES / f"{name}.onnx")
    pipeline = build_pipeline(defaults={"shard": options})
    gopt.shard(source, Mesh.parse(mesh), accumulate=micro_steps, pipeline=pipeline).write(out)
    return out


def drawn(folder: Path) -> str:
    """Samples for every batch input; integers are 0 or 1, an id or a label of any fixture."""
    manifest, _ = read_manifest(folder)
    generator, arrays = np.random.default_rng(1), {}
    for each in manifest.inputs_of(InputKind.BATCH):
        dtype, shape = numpy_dtype(each.dtype), [24, *each.type.dims]
        whole = dtype.kind in "iu"
        values = generator.integers(0, 2, shape) if whole else generator.standard_normal(shape)
        arrays[each.name] = values.astype(dtype)
    path = folder.parent / "data.npz"
    np.savez(path, **arrays)
    return str(path)


def trained(folder: Path, data: str, tuning: bool, steps: int = 4) -> tuple[bytes, list[dict[str, bytes]]]:
    """The bits of all losses, by step and rank, and of the last states of every rank."""
    _, mesh = read_manifest(folder)
    job = Job(folder=folder, data=data, steps=steps, settings=settings(folder), tuning=tuning)
    told: list[Progress] = []
    states: list[dict[str, bytes]] = [{} for _ in range(mesh.ranks)]

    def live(engine: Any) -> None:
        trainer = Trainer(job, engine, lambda step, call: None)
        trainer.run(told.append)
        states[engine.rank] = {name: trainer.rank.to_host(value).tobytes() for name, value in trainer.rank.held.items()}

    run_threads(mesh, 120.0, live)
    return np.array([progress.losses for progress in told]).tobytes(), states


@pytest.fixture(params=["llvm", "numpy"])
def tiles(request: Any, monkeypatch: Any) -> Iterator[list[str]]:
    """Runs of any length go in short tiles; the names of the kernels that ran."""
    for name, value in (("MIN_TILED_LENGTH", 4), ("TILE", 7), ("MIN_NODES", 1)):
        monkeypatch.setattr(tiling, name, value)
    monkeypatch.setattr(numpy_kernels, "TILE", 7)
    if request.param == "numpy":
        monkeypatch.setattr(tiling, "is_supported", lambda *_: False)
    runs: list[str] = []
    real = tiling.CompiledRun.run
    monkeypatch.setattr(tiling.CompiledRun, "run", lambda self, given: (runs.append(self.title), real(self, given))[1])
    yield runs


@pytest.mark.parametrize(("name", "mesh", "micro_steps", "options"), part(CASES, len(CASES) // 4))
def test_training_has_the_same_bits_without_tuning(name, mesh, micro_steps, options, tiles, tmp_path):
    folder = sharded(tmp_path, name, mesh, micro_steps, options)
    data = drawn(folder)
    tuned = trained(folder, data, tuning=True)
    assert tiles, "no elementwise run was taken out"
    tiles.clear()
    plain = trained(folder, data, tuning=False)
    assert not tiles
    differ = [
        (rank, name) for rank, (one, other) in enumerate(zip(tuned[1], plain[1], strict=True))
        for name in one.keys() | other.keys() if one.get(name) != other.get(name)
    ]  # fmt: skip
    assert differ == [] and tuned[0] == plain[0]


def test_a_planted_difference_is_seen(tmp_path, monkeypatch):
    """The comparison is of bits: one last bit of one state shows."""
    folder = sharded(tmp_path, "mlp_adamw", "shard=2", 1, {"stage": 2})
    data = drawn(folder)
    for name, value in (("MIN_TILED_LENGTH", 4), ("MIN_NODES", 1)):
        monkeypatch.setattr(tiling, name, value)
    due = trained(folder, data, tuning=False)
    assert trained(folder, data, tuning=True) == due
    real = tiling.CompiledRun.run

    def spoiled(run: tiling.CompiledRun, given: Any) -> Any:
        results = real(run, given)
        flat = next(iter(results.values())).array.reshape(-1)
        if flat.dtype == np.float32:
            flat[:1] = np.nextafter(flat[:1], np.float32(np.inf))
        return results

    monkeypatch.setattr(tiling.CompiledRun, "run", spoiled)
    assert trained(folder, data, tuning=True) != due


def test_without_tuning_a_step_writes_no_array_that_it_was_fed(tmp_path):
    from runtime_graphs import sgd_feeds, sharded_sgd

    cuts = [0, 8]
    graph, feeds = sharded_sgd(tmp_path, 0, cuts), sgd_feeds(cuts)[0]
    plan = plan_execution(graph, {"w.new": "w", "b.new": "b", "p.new": "p", "m.new": "m"}, Host(NO_TUNING), lambda _: 0)
    assert not plan.send_requests() and not plan.gather_requests() and not plan.plans_memory
    before = {name: value.copy() for name, value in feeds.items()}

    def call(index: int, node: Any, inputs: list[Any]) -> list[Any]:
        flat = np.concatenate([each.reshape(-1) for each in inputs])
        return [flat] if node.op_type == "ReduceScatter" else [flat[:6].reshape(2, 3).copy(), flat[6:].copy()]

    Executor(plan, Host(NO_TUNING).sessions()).run(feeds, call)
    assert all(np.array_equal(feeds[name], value) for name, value in before.items())


def test_the_option_chooses(tmp_path):
    assert tuning_of(True) is CPU_TUNING and tuning_of(False) is NO_TUNING
    folder = written(tmp_path)
    plans: list[bool] = []
    for tuning in (True, False):
        job = Job(folder=folder, data=samples(tmp_path), steps=1, settings=settings(folder), tuning=tuning)
        run_threads(
            read_manifest(folder)[1], 120.0,
            lambda engine: plans.append(Trainer(job, engine, lambda *_: None).device.tuning.plans_memory),  # noqa: B023
        )  # fmt: skip
    assert plans == [True, True, False, False]


def test_verify_runs_ranks_without_tuning(tmp_path):
    """It feeds and reads every value, and writes over none."""
    folder = sharded(tmp_path, "mlp_adamw", "shard=2", 1, {"stage": 2})
    programs = [program for rank in Verifier(folder).ranks for program in rank.programs.values()]
    assert programs and not any(program.plans_memory for program in programs)


@mpi
@pytest.mark.slow
def test_without_tuning_processes_share_no_memory(tmp_path):
    folder, data = written(tmp_path, recipe=Recipe(widths=(3, 150, 160, 4)), stage=2), samples(tmp_path)
    train(folder, data, 4, checkpoint=tmp_path / "threads")
    tuned = values(tmp_path / "threads" / "step_00000004", tmp_path)
    arguments = ["--launch", "2", "--json", "--no-tuning", "--checkpoint", str(tmp_path / "mpi")]
    done = run(command(folder, data, 4, *arguments))
    assert done.returncode == 0, done.stderr
    plain = values(tmp_path / "mpi" / "step_00000004", tmp_path)
    assert json.loads(done.stdout)["shared_calls"] == 0
    assert all(value.tobytes() == plain[name].tobytes() for name, value in tuned.items())
