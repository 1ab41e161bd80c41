"""``gopt run --engine torch``: the states of threads, under gopt's launcher and torchrun; faults are named."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from gopt.errors import RunError
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import run_threads
from gopt.runtime.session import SessionCache
from gopt.runtime.training.evaluation import EvaluationPlan
from gopt.runtime.training.job import Job
from gopt.runtime.training.train import Trainer

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("engines", "training")]
from test_evaluation import HELD_OUT, arrays, evaluation_of, sharded
from test_nccl import TRAININGS, differing, job, states, train_on_threads, written

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
engine = pytest.importorskip("gopt.runtime.pytorch.engine")
TorchHost = pytest.importorskip("gopt.runtime.pytorch.device").TorchHost


def run(folder: Path, out: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    given = job(folder, out)
    settings = [part for key, value in given.settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, *(launcher or ("-m", "gopt")), "run", str(folder), "--data", given.data, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    more = ["--steps", "3", "--checkpoint", str(out), *options]
    return subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda each: f"{each[0]}-{each[1]}-{json.dumps(each[2])}")
def test_processes_train_as_threads_do(training, tmp_path):
    name, mesh, options = training
    folder = written(name, mesh, tmp_path, **options)
    train_on_threads(job(folder, tmp_path / "threads"))
    done = run(folder, tmp_path / "torch", "--engine", "torch", "--launch", str(Mesh.parse(mesh).ranks))
    assert done.returncode == 0, done.stderr
    loose = 1e-4 if "16" not in name else 5e-2
    assert differing(states(tmp_path / "threads"), states(tmp_path / "torch"), loose) == []


def test_torchrun_starts_ranks_and_a_resumed_run_is_exact(tmp_path):
    folder = written("mlp_adamw", "shard=2", tmp_path, stage=2)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gopt")
    for out, more in (("whole", ()), ("parts", ("--steps", "2")), ("parts", ("--resume",))):
        done = run(folder, tmp_path / out, *more, launcher=torchrun)
        assert done.returncode == 0, done.stderr
        assert "(torch)" in done.stdout
    assert differing(states(tmp_path / "whole"), states(tmp_path / "parts"), 0.0) == []


def test_two_deterministic_runs_have_equal_bits(tmp_path):
    folder = written("cnn_sgd", "shard=2", tmp_path, stage=2)
    for out in ("one", "other"):
        done = run(folder, tmp_path / out, "--engine", "torch", "--launch", "2", "--deterministic")
        assert done.returncode == 0, done.stderr
    assert differing(states(tmp_path / "one"), states(tmp_path / "other"), 0.0) == []


def test_states_are_evaluated_by_pytorch(tmp_path, monkeypatch):
    folder = sharded(tmp_path, "shard=1")  # traces are not for threads
    np.savez(tmp_path / "data.npz", **arrays(24, 0))
    np.savez(tmp_path / "held.npz", **arrays(HELD_OUT, 1))
    plan = EvaluationPlan(model=evaluation_of(tmp_path), data=str(tmp_path / "held.npz"), every=2)
    given = Job(folder=folder, data=str(tmp_path / "data.npz"), steps=3, settings={"lr": "0.05"}, evaluation=plan)

    def evaluations(device) -> list[list[float]]:
        found = []

        def tell(progress) -> None:
            found.extend([] if progress.evaluation is None else [[*progress.evaluation.values.values()]])

        run_threads(
            Mesh.parse("shard=1"), 60, lambda engine: Trainer(given, engine, lambda *_: None, device()).run(tell)
        )
        return found

    due = evaluations(lambda: None)
    monkeypatch.setattr(SessionCache, "build", lambda *_, **__: pytest.fail("a session of ONNX Runtime"))
    np.testing.assert_allclose(evaluations(TorchHost), due, rtol=1e-5)
    assert len(due) == 2


def test_another_number_of_ranks_is_refused(tmp_path):
    folder = written("mlp_adamw", "shard=3", tmp_path)
    done = run(
        folder, tmp_path / "out", launcher=("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gopt")
    )
    assert done.returncode and "the launcher started 2 ranks, the folder holds 3" in done.stderr


def test_a_batch_that_ends_is_said_once_by_the_rank_that_met_it(tmp_path):
    folder = written("mlp_adamw", "shard=2", tmp_path)
    faulty = tmp_path / "faulty.py"
    faulty.write_text("def batches(part, parts):\n    raise ValueError('no samples')\n    yield\n")
    done = run(folder, tmp_path / "ck", "--engine", "torch", "--launch", "2", "--data", f"{faulty}:batches")
    assert done.returncode == 5
    assert done.stderr.count("no samples") == 1


@pytest.mark.parametrize(
    ("nodes", "host"), [("gpu[003-006,9],login", "gpu003"), ("login", "login"), ("a1,a2", "a1"), ("n-[7]", "n-7")]
)
def test_the_first_host_of_slurms_list(nodes, host):
    assert engine._first_host(nodes) == host


def test_a_list_of_nodes_that_cannot_be_read():
    with pytest.raises(RunError, match="Slurm's list of nodes"):
        engine._first_host("[]")


class NoWatchdog:
    def on(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def test_a_third_reduction_waits_for_the_first():
    """Parts of gradients arrive in the memory of two buckets, and not of all."""
    ranks, finished = object.__new__(engine.TorchEngine), []
    ranks._reductions = []
    calls = [
        engine.StartedCall(NoWatchdog(), f"call {number}", lambda number=number: finished.append(number) or [number])
        for number in range(4)
    ]
    for call, due in zip(calls, ([], [], [0], [0, 1])):
        ranks._finish_reductions(call)
        assert finished == due
    assert [call.result() for call in calls] == [[0], [1], [2], [3]] == [call.result() for call in calls]
    assert finished == [0, 1, 2, 3]


def test_a_call_that_an_error_left_on_its_way_keeps_its_group(tmp_path):
    """The end of a group waits for its calls: a script that fails would hang until the time of the call is up."""
    alone = engine.TorchEngine(Mesh.parse("shard=1"), torch.device("cpu"), 5.0, print)
    try:
        alone.prepare(["shard"])
        call = engine.StartedCall(alone.watchdog, "a call", lambda: [])
        alone._started.add(call)
        alone.leave()
        assert alone._groups
        call.wait()
        alone.leave()
        assert not alone._groups
    finally:
        torch.distributed.destroy_process_group()


def test_processes_that_are_started_again_do_not_meet_those_before(monkeypatch):
    """torchrun keeps its store: what the processes before a restart wrote there was read, and their addresses tried."""
    served = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": served.port,
        "RANK": 0,
        "WORLD_SIZE": 1,
        "GROUP_WORLD_SIZE": 1,
    }
    for name, value in {**variables, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    stores = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(engine._meeting(timedelta(seconds=600))["store"])
    stores[0].set("address", "of a process before")
    assert [store.check(["address"]) for store in stores] == [True, False]
