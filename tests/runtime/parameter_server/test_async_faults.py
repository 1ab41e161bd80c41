"""Faults of runs without rounds: gradients that are not numbers, and data that ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_runs import buckets, folder, run_split
from seeded_order import Seeded

from gopt.artifact.checkpoint_index import complete_steps
from gopt.artifact.server_entries import Mode
from gopt.errors import OptionError, RunError
from gopt.runtime.parameter_server.faults import FaultOptions, OnNan, StopFault
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.trainer_messages import TrainerMessages
from gopt.runtime.training.job import Job

BATCHES, ROWS = 5, 4


@pytest.fixture
def data(tmp_path: Path) -> str:
    random = np.random.default_rng(3)
    path = tmp_path / "data.npz"
    rows = BATCHES * ROWS
    np.savez(path, x=random.normal(size=(rows, 3)).astype("f4"), y=random.normal(size=(rows, 2)).astype("f4"))
    return str(path)


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer 1 pushes values that are not numbers in its second step."""
    usual = TrainerMessages._push

    def push(self: TrainerMessages, node: Any, number: int, inputs: Sequence[Any]) -> None:
        if (self.endpoint.number, number) == (1, 1):
            inputs = [np.full_like(each, np.inf) for each in inputs]
        usual(self, node, number, inputs)

    monkeypatch.setattr(TrainerMessages, "_push", push)


@pytest.mark.usefixtures("spoilt")
def test_a_push_that_is_no_number_is_skipped_and_counted(tmp_path: Path, data: str) -> None:
    lines: list[str] = []
    skips = FaultOptions(nan=OnNan.SKIP, tell=lines.append)
    run = run_split(folder(tmp_path), data, 3, order=Seeded(0), faults=skips)
    count = sum(len(buckets(server)) for server in run.servers.values())
    assert sum(server.usage.skipped for server in run.servers.values()) == count == len(lines)
    assert {key.version for server in run.servers.values() for key in server.keys.values()} == {5}  # 3 + 3 - 1
    said = re.compile(r"trainer 1 pushed inf for \w+ \(key .*\) in round 1: the message is not applied")
    assert all(map(said.fullmatch, lines)), lines
    assert all(np.isfinite(run.parameter(name)).all() for name in ("w0", "b1"))
    assert f"; {count} messages were not applied" in str(run.trainers[0].report)


@pytest.mark.usefixtures("spoilt")
def test_a_push_that_is_no_number_ends_the_run_with_abort(tmp_path: Path, data: str) -> None:
    with pytest.raises(RunError, match=r"trainer 1 pushed inf for .* in round 1"):
        run_split(folder(tmp_path), data, 3, order=Seeded(0), faults=FaultOptions(nan=OnNan.ABORT))


def test_skip_is_refused_where_trainers_update_themselves(tmp_path: Path, data: str) -> None:
    plan = ServerJob.read(Job(folder=folder(tmp_path, mode=Mode.GEO), data=data, steps=1)).plan
    with pytest.raises(OptionError, match="--nan skip: in mode geo"):
        FaultOptions(nan=OnNan.SKIP).check(plan)


@pytest.mark.parametrize("stop", [*StopFault])
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.HALF_ASYNC])
def test_a_run_without_rounds_ends_with_its_data(mode: Mode, stop: StopFault, tmp_path: Path, data: str) -> None:
    """Trainer 0 has one batch more than trainer 1; a checkpoint that all write lies between."""
    lines: list[str] = []
    kept = tmp_path / "kept"
    run = run_split(
        folder(tmp_path, mode=mode), data, 9, checkpoint=kept, every=2, order=Seeded(1),
        faults=FaultOptions(stop=stop, tell=lines.append),
    )  # fmt: skip
    versions = {key.version for server in run.servers.values() for key in server.keys.values()}
    if stop is StopFault.ALL:
        assert versions == {5} and complete_steps(kept) == [2, 3]
        assert lines[0] == "trainer 1 has no more data after step 2"
    else:
        assert versions <= {4, 5} and max(complete_steps(kept)) in (2, 3)
        assert lines[0] == "trainer 1 has no more data after step 2: the run ends"
    assert {trainer.step for trainer in run.trainers.values()} == {max(complete_steps(kept))}


@pytest.mark.parametrize("dealt", ["unequal", "unequal_for_the_chief"])
def test_a_trainer_without_data_takes_part_in_checkpoints(dealt: str, tmp_path: Path) -> None:
    """Checkpoints have the step of those that go on, also where the chief, which names them, has no more data."""
    kept = tmp_path / "kept"
    run_split(
        folder(tmp_path), f"async_runs:{dealt}", 9, checkpoint=kept, every=2, keep=9, order=Seeded(1),
        faults=FaultOptions(stop=StopFault.ALL),
    )  # fmt: skip
    assert complete_steps(kept) == [2, 4, 5]
