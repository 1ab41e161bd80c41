"""What a run in rounds does about faults, on threads: each endpoint is real, the one at fault is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import source

from gopt import api
from gopt.errors import GoptError, RunError
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.roster import Settings
from gopt.runtime.messages.threads import ThreadHub, run_threads
from gopt.runtime.parameter_server import trainer_messages
from gopt.runtime.parameter_server.faults import FaultOptions, OnNan
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run import run_endpoint
from gopt.runtime.parameter_server.trainer import PushPullTrainer
from gopt.runtime.parameter_server.waits import ServerSummary
from gopt.runtime.training.job import Job, Progress


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    home = tmp_path_factory.mktemp("faults")
    random = np.random.default_rng(3)
    np.savez(home / "data.npz", x=random.normal(size=(64, 32)).astype("f4"), y=random.integers(0, 10, 64))
    api.split(source("mlp_adamw"), SplitOptions(trainers=3, servers=2, minimum=16)).write(home / "split")
    return Job(folder=home / "split", data=str(home / "data.npz"), steps=4, settings={"lr": "1e-2"})


class Gone(Exception):
    """A trainer ends here."""


def play(
    job: Job, jobs: Callable[[int, ServerJob], ServerJob] = lambda _, each: each, *, continues: bool = False,
    faults: FaultOptions | None = None, deadline: float = 60.0, absent: Sequence[int] = (),
) -> list[Progress]:  # fmt: skip
    """Run all endpoints; ``jobs``: what each of them was started with."""
    given = replace(ServerJob.read(job), faults=replace(faults or FaultOptions(), continues=continues))
    hub = ThreadHub(given.roster(), Settings(deadline=deadline))
    told: list[Progress] = []

    def work(endpoint: Endpoint) -> Any:
        if endpoint.number not in absent:
            run_endpoint(jobs(endpoint.number, given), endpoint, told.append)

    run_threads(hub, work, lambda number: continues and 0 < number < 3)
    return told


def die(monkeypatch: pytest.MonkeyPatch, trainer: int, step: int, *, pushed: bool = False) -> None:
    """Let a trainer end in a step: before it, or when it has pushed."""
    name = "_end_round" if pushed else "_step"
    usual = getattr(PushPullTrainer, name)

    def until(self: PushPullTrainer, given: Any) -> Any:
        if (self.endpoint.number, self.step) == (trainer, step):
            raise Gone
        return usual(self, given)

    monkeypatch.setattr(PushPullTrainer, name, until)


def test_a_trainer_that_is_lost_ends_the_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    die(monkeypatch, 1, 2)
    with pytest.raises(Gone):
        play(job)


@pytest.mark.parametrize("pushed", [False, True])
def test_the_others_go_on_and_it_is_told_once(job: Job, pushed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    die(monkeypatch, 1, 2, pushed=pushed)
    lines: list[str] = []
    told = play(job, continues=True, faults=FaultOptions(tell=lines.append))
    assert [each.step for each in told] == [1, 2, 3, 4]
    assert [len(each.losses) for each in told] == [3, 3, 2, 2]
    assert told[3].samples * 3 == told[0].samples * 2
    assert len(lines) == 1 and lines[0].startswith("trainer 1 (endpoint 1, process 1) is lost in step ")
    assert lines[0].endswith("; 2 of 3 trainers go on")


def test_without_the_chief_the_run_ends(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    die(monkeypatch, 0, 2)
    with pytest.raises(Gone):
        play(job, continues=True)


def test_a_checkpoint_without_the_lost_one_is_whole(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    die(monkeypatch, 2, 3)
    kept = replace(job, checkpoint=tmp_path / "kept", every=2)
    assert len(play(kept, continues=True)) == 4
    monkeypatch.undo()
    assert [each.step for each in play(replace(kept, resume=True, steps=6))] == [5, 6]


def test_who_is_late_at_the_start_is_named(job: Job) -> None:
    with pytest.raises(RunError, match=r"after 0.5 s, .* still waits for server 1 \(endpoint 4, process 4\) to come"):
        play(job, absent=[4], deadline=0.5)


@pytest.mark.parametrize(("field", "changed"), [("--steps", {"steps": 5}), ("--set", {"settings": {"lr": "1e-3"}})])
def test_different_options_are_refused_with_the_field(job: Job, field: str, changed: dict[str, Any]) -> None:
    said: list[str] = []

    def jobs(number: int, given: ServerJob) -> ServerJob:
        return replace(given, job=replace(job, **changed)) if number == 3 else given

    hub = ThreadHub(ServerJob.read(job).roster(), Settings(deadline=60))

    def work(endpoint: Endpoint) -> None:
        try:
            run_endpoint(jobs(endpoint.number, ServerJob.read(job)), endpoint, lambda _: None)
        except GoptError as error:
            said.append(error.message)

    run_threads(hub, work)
    assert len(said) == 5 and all(each.startswith(f"{field} differs between ") for each in said), said
    assert all("server 0 (endpoint 3, process 3)" in each for each in said)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_gradient_that_is_no_number(job: Job, aborts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = trainer_messages.TrainerMessages._push

    def spoil(self: trainer_messages.TrainerMessages, node: Any, number: int, inputs: Sequence[Any]) -> None:
        if (self.endpoint.number, number) == (1, 2):
            inputs = [np.array(each) for each in inputs]
            inputs[0].reshape(-1)[0] = np.nan
        usual(self, node, number, inputs)

    monkeypatch.setattr(trainer_messages.TrainerMessages, "_push", spoil)
    if not aborts:
        told = play(job)
        assert len(told) == 4 and np.isnan(told[3].losses).all()
        return
    with pytest.raises(RunError, match=r"trainer 1 pushed nan for fc\d\.\w+ \(key .*\) in round 2"):
        play(job, faults=FaultOptions(nan=OnNan.ABORT))


def test_a_gradient_that_is_not_pushed_is_named(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = trainer_messages.TrainerMessages._push

    def forget(self: trainer_messages.TrainerMessages, node: Any, number: int, inputs: Sequence[Any]) -> None:
        if (self.endpoint.number, number) != (2, 1):
            usual(self, node, number, inputs)

    monkeypatch.setattr(trainer_messages.TrainerMessages, "_push", forget)
    with pytest.raises(RunError, match=r"trainer 2 ended round 1 and did not push bucket \d+ \(.*fc.*\) of round 1"):
        play(job)


def test_a_message_that_comes_twice_changes_nothing_and_is_counted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [each.losses for each in play(job)]
    usual = Endpoint.isend
    found: list[ServerSummary] = []

    def twice(self: Endpoint, to: int, message: Any, *, owned: bool = False) -> Any:
        if message.kind is Kind.PUSH and self.number == 1:
            usual(self, to, message)
        return usual(self, to, message, owned=owned)

    monkeypatch.setattr(Endpoint, "isend", twice)
    assert [each.losses for each in play(job, faults=FaultOptions(summarise=found.extend))] == plain
    assert sum(each.dropped for each in found) >= 4 and [each.server for each in found] == [0, 1]


def test_steps_and_servers_say_what_moved(job: Job) -> None:
    found: list[ServerSummary] = []
    told = play(job, faults=FaultOptions(summarise=found.extend))
    pushed = sum(each.more["bytes_pushed"] for each in told)
    pulled = sum(each.more["bytes_pulled"] for each in told)
    assert pushed * 3 == sum(each.bytes_in for each in found) > 0
    assert pulled * 3 == sum(each.bytes_out for each in found) > 0
    assert {each.rounds for each in found} == {4} and all(each.answered for each in found)


def test_a_server_without_a_piece_takes_part(job: Job, tmp_path: Path) -> None:
    api.split(source("mlp_adamw"), SplitOptions(trainers=3, servers=9, minimum=10**6)).write(tmp_path / "split")
    wide = replace(job, folder=tmp_path / "split")
    keys = ServerJob.read(wide).plan.keys
    assert {key.server for key in keys} < set(range(9))
    assert [each.step for each in play(wide)] == [1, 2, 3, 4]
