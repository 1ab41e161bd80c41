"""Trainers and servers really run: beside the same step with all-reduces, over restarts, in other numbers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from helpers import source

from gopt import api
from gopt.artifact.checkpoint_index import step_dir
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import OptionError
from gopt.ir.external_data import load_state
from gopt.offline.resplit import resplit
from gopt.parameter_server.options import SplitOptions
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import run_threads
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run import Hooks, run_in_threads
from gopt.runtime.training.job import Job, Progress
from gopt.runtime.training.train import Trainer

SET = {"lr": "1e-2"}


@pytest.fixture
def data(tmp_path: Path) -> str:
    random = np.random.default_rng(3)
    path = tmp_path / "data.npz"
    np.savez(path, x=random.normal(size=(64, 32)).astype("f4"), y=random.integers(0, 10, 64))
    return str(path)


def folder(tmp_path: Path, name: str = "mlp_adamw", **given: object) -> Path:
    options = SplitOptions(**{"trainers": 2, "servers": 2, "minimum": 16, **given})  # type: ignore[arg-type]
    target = tmp_path / f"split{len(list(tmp_path.iterdir()))}"
    api.split(source(name), options).write(target)
    return target


def losses(
    path: Path, data: str, steps: int = 4, trainers: int | None = None, **given: object
) -> list[tuple[float, ...]]:
    job = Job(folder=path, data=data, steps=steps, settings=SET, **given)  # type: ignore[arg-type]
    told: list[Progress] = []
    run_in_threads(ServerJob.read(job, trainers), told.append, deadline=60)
    return [each.losses for each in told]


def reference(tmp_path: Path, data: str, ranks: int) -> list[tuple[float, ...]]:
    """The same step with its gradients averaged by all-reduces."""
    target = tmp_path / f"ranks{ranks}"
    mesh = Mesh((("dp", ranks),))
    api.shard(source("mlp_adamw"), mesh, stage=0).write(target)
    told: list[Progress] = []
    job = Job(folder=target, data=data, steps=4, settings=SET)
    run_threads(mesh, 60, lambda engine: Trainer(job, engine, lambda *_: None).run(told.append))
    return [each.losses for each in told]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_losses_are_those_of_all_reduces(trainers: int, servers: int, tmp_path: Path, data: str) -> None:
    got = losses(folder(tmp_path, trainers=trainers, servers=servers), data)
    np.testing.assert_allclose(got, reference(tmp_path, data, trainers), rtol=1e-6)


def test_the_number_of_trainers_is_a_start_time_value(tmp_path: Path, data: str) -> None:
    np.testing.assert_allclose(
        losses(folder(tmp_path), data, trainers=3), reference(tmp_path, data, 3), rtol=1e-6
    )  # fmt: skip


def test_a_split_may_fix_its_trainers(tmp_path: Path, data: str) -> None:
    with pytest.raises(OptionError, match="exactly 2"):
        losses(folder(tmp_path, fixed_trainers=True), data, trainers=3)


def test_pulls_at_the_end_give_the_same_bits(tmp_path: Path, data: str) -> None:
    assert losses(folder(tmp_path, pull=PullAt.END), data) == losses(folder(tmp_path), data)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, data: str) -> None:
    split = folder(tmp_path, "mlp_adamw", servers=3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    every = losses(split, data, steps=4, checkpoint=whole, every=2)
    first = losses(split, data, steps=2, checkpoint=parts)
    rest = losses(split, data, steps=4, checkpoint=parts, resume=True)
    assert first + rest == every
    for server in (2, 3, 4):
        path = f"{step_dir(4)}/rank_{server:04d}.safetensors"
        one, other = load_state(whole / path), load_state(parts / path)
        assert one.keys() == other.keys() and one
        assert all(np.array_equal(one[name].numpy(), other[name].numpy()) for name in one)


def test_micro_steps_push_once(tmp_path: Path, data: str) -> None:
    split = folder(tmp_path, accumulate=2)
    got = losses(split, data, steps=2)
    assert len(got) == 2 and all(np.isfinite(each).all() for each in got)


def test_a_checkpoint_goes_on_with_any_number_of_servers(tmp_path: Path, data: str) -> None:
    """V12: two servers and three, each restarted with another number, train on to the same bits."""
    rest = []
    for servers, later in ((2, 5), (3, 1)):
        losses(folder(tmp_path, servers=servers), data, steps=2, checkpoint=tmp_path / f"kept{servers}")
        target = tmp_path / f"more{later}"
        resplit(tmp_path / f"kept{servers}" / step_dir(2), {"servers": later}).write(target)
        rest.append(losses(target, data, steps=3))
    assert rest[0] == rest[1]


@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mode", [Mode.SYNC, *(pytest.param(mode, marks=pytest.mark.slow) for mode in Mode if mode is not Mode.SYNC)]
)
def test_a_signal_at_the_start_keeps_a_whole_checkpoint(mode: Mode, every: int, tmp_path: Path, data: str) -> None:
    path = folder(tmp_path, mode=mode)
    for when in range(1, 4):  # the n-th time that a trainer asks for a signal
        kept, asked = tmp_path / f"kept{when}", itertools.count(1)
        job = Job(folder=path, data=data, steps=9, settings=SET, checkpoint=kept, every=every)
        hooks = Hooks(stop_signal=lambda asked=asked, when=when: 2 * (next(asked) >= when))
        step, stopped = run_in_threads(ServerJob.read(job), lambda progress: None, hooks, deadline=60)
        assert stopped == 2 and 0 < step < 9 and (kept / step_dir(step) / "index.json").exists()
        assert len(losses(path, data, steps=step + 1, checkpoint=kept, resume=True)) == 1
