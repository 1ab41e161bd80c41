"""What a run in rounds does about faults, on threads: each endpoint is real, the one at fault is played."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import source

from gopt import api
from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import GoptError, InputError, OptionError, RunError
from gopt.ir.external_data import load_state
from gopt.offline.merge import merge
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.roster import Settings
from gopt.runtime.messages.threads import ThreadHub, run_threads
from gopt.runtime.parameter_server import trainer_data, trainer_messages
from gopt.runtime.parameter_server.faults import FaultOptions, OnNan, StopFault
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.run import run_endpoint, run_in_threads
from gopt.runtime.parameter_server.trainer import PushPullTrainer
from gopt.runtime.parameter_server.waits import ServerSummary
from gopt.runtime.training.data import open_data
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
        run_in_threads(ServerJob.read(job), lambda _: None)


@pytest.mark.parametrize("pushed", [False, True])
def test_the_others_go_on_and_it_is_told_once(job: Job, pushed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    die(monkeypatch, 1, 2, pushed=pushed)
    lines: list[str] = []
    told = play(job, continues=True, faults=FaultOptions(tell=lines.append))
    assert [each.step for each in told] == [1, 2, 3, 4]
    assert [len(each.losses) for each in told] == [3, 3, 2, 2]
    assert told[3].samples * 3 == told[0].samples * 2
    left_out = [line for line in lines if line.startswith("round 2 goes without trainer 1: ")]
    (line,) = [line for line in lines if line not in left_out]
    assert len(left_out) == pushed  # nobody knows whether all of it came: it had not ended the round
    assert line.startswith("trainer 1 (endpoint 1, process 1) is lost in step ")
    assert line.endswith("; 2 of 3 trainers go on")


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_a_server_ends_without_its_chief(mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other trainer is there, whose own error would hide what the server does."""
    random = np.random.default_rng(3)
    np.savez(tmp_path / "data.npz", x=random.normal(size=(64, 32)).astype("f4"), y=random.integers(0, 10, 64))
    options = SplitOptions(trainers=1, servers=1, minimum=16, mode=mode)
    api.split(source("mlp_adamw"), options).write(tmp_path / "split")
    die(monkeypatch, 0, 1)
    job = Job(folder=tmp_path / "split", data=str(tmp_path / "data.npz"), steps=4, settings={"lr": "1e-2"})
    given = replace(ServerJob.read(job), faults=FaultOptions(continues=True))
    hub = ThreadHub(given.roster(), Settings(deadline=60))
    with pytest.raises(RunError, match=r"^trainer 0 \(endpoint 0, process 0\) is lost: .*; server 0 "):
        run_threads(hub, lambda endpoint: run_endpoint(given, endpoint, lambda _: None), lambda number: number == 0)


def states(kept: Path, step: int, endpoint: int) -> dict[str, bytes]:
    """What an endpoint kept."""
    held = load_state(str(kept / f"step_{step:08d}" / f"rank_{endpoint:04d}.safetensors"))
    return {name: np.asarray(value.numpy()).tobytes() for name, value in held.items()}


def after_each_push(monkeypatch: pytest.MonkeyPatch, what: Callable[[PushPullTrainer, int], None]) -> None:
    """Call something with the messages of a trainer and the round, behind every push."""
    usual = trainer_messages.TrainerMessages._push

    def push(self: trainer_messages.TrainerMessages, node: Any, number: int, inputs: Sequence[Any]) -> None:
        usual(self, node, number, inputs)
        what(self, number)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer_messages.TrainerMessages, "_push", push)


def end_round_for_server_0_only(self: PushPullTrainer, round_number: int) -> None:
    self.messages.flush()
    end = self.endpoint.message(Kind.BARRIER, 0, round_number)
    self.endpoint.send(self.server_job.server(0), end)


def test_a_trainer_of_which_one_server_has_all_counts_nowhere(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    usual = PushPullTrainer._end_round

    def until(self: PushPullTrainer, number: int) -> None:
        if (self.endpoint.number, number) != (1, 2):
            return usual(self, number)
        end_round_for_server_0_only(self, number)
        raise Gone

    with monkeypatch.context() as patch:
        patch.setattr(PushPullTrainer, "_end_round", until)
        play(replace(job, checkpoint=tmp_path / "first"), continues=True)
    die(monkeypatch, 1, 2)
    play(replace(job, checkpoint=tmp_path / "second"), continues=True)
    for endpoint in (3, 4):
        assert states(tmp_path / "first", 4, endpoint) == states(tmp_path / "second", 4, endpoint)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_trainer_that_dies_between_two_pushes_counts_nowhere(
    servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The step is the one that the others would have made without it, on every server and for every bucket."""
    random = np.random.default_rng(3)
    np.savez(tmp_path / "data.npz", x=random.normal(size=(64, 32)).astype("f4"), y=random.integers(0, 10, 64))
    small = SplitOptions(trainers=3, servers=servers, minimum=16, cap=2000)
    api.split(source("mlp_adamw"), small).write(tmp_path / "split")
    job = Job(folder=tmp_path / "split", data=str(tmp_path / "data.npz"), steps=4, settings={"lr": "1e-2"})

    def die_after_the_first(messages: Any, number: int) -> None:
        if (messages.endpoint.number, number) == (1, 2):
            messages.flush()
            raise Gone

    with pytest.MonkeyPatch.context() as patch:
        after_each_push(patch, die_after_the_first)
        lines: list[str] = []
        kept, faults = replace(job, checkpoint=tmp_path / "first"), FaultOptions(tell=lines.append)
        first = play(kept, continues=True, faults=faults)
    die(monkeypatch, 1, 2)
    second = play(replace(job, checkpoint=tmp_path / "second"), continues=True)
    assert [each.losses for each in first] == [each.losses for each in second]
    for endpoint in range(3, 3 + servers):
        assert states(tmp_path / "first", 4, endpoint) == states(tmp_path / "second", 4, endpoint)
    assert [line for line in lines if line.startswith("round 2 goes without trainer 1: not all")]


def unequal_data(job: Job, monkeypatch: pytest.MonkeyPatch, kept: Path) -> list[Progress]:
    """Three steps, the last without trainer 2."""
    with monkeypatch.context() as patch:
        die(patch, 2, 2)
        return play(replace(job, steps=3, checkpoint=kept), continues=True)


@pytest.mark.parametrize("stop", [*StopFault])
def test_a_run_ends_with_its_data(job: Job, stop: StopFault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are 8 batches: trainers 0 and 1 have three each, trainer 2 has two."""
    lines: list[str] = []
    kept = replace(job, checkpoint=tmp_path / "kept")
    told = play(kept, faults=FaultOptions(stop=stop, tell=lines.append))
    if stop is StopFault.FIRST:
        assert [len(each.losses) for each in told] == [3, 3]
        assert lines == ["trainer 2 has no more data after step 2: the run ends"]
        return
    assert [len(each.losses) for each in told] == [3, 3, 2]
    ended = [f"trainer {number} has no more data after step 3: the run ends" for number in (0, 1)]
    assert lines == ["trainer 2 has no more data after step 2", *ended]
    other = unequal_data(job, monkeypatch, tmp_path / "other")
    assert [each.losses for each in told] == [each.losses for each in other]
    for endpoint in (3, 4):
        assert states(tmp_path / "kept", 3, endpoint) == states(tmp_path / "other", 3, endpoint)


def test_data_that_ends_is_an_error_without_stop(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def once(data, types, order, drawn):
        return open_data(data, types, replace(order, once=True), drawn)

    monkeypatch.setattr(trainer_data, "open_data", once)
    with pytest.raises(InputError, match="trainer 2: the data has 8 batches") as found:
        play(job)
    assert "--stop first or all" in found.value.hints[0]


@pytest.mark.parametrize("given", [{"pull": PullAt.END}, {"accumulate": 2}])
def test_values_behind_the_update_are_pulled_without_a_trainer(job: Job, given: dict[str, Any], tmp_path: Path) -> None:
    """A trainer that waits for the new version has told before that it has pushed all."""
    options = SplitOptions(**{"trainers": 3, "servers": 2, "minimum": 16, **given})
    api.split(source("mlp_adamw"), options).write(tmp_path / "split")
    told = play(replace(job, folder=tmp_path / "split"), faults=FaultOptions(stop=StopFault.ALL), deadline=10)
    assert [len(each.losses) for each in told] == ([3] if "accumulate" in given else [3, 3, 2])


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
    merge(tmp_path / "kept" / "step_00000004", tmp_path / "merged.onnx")
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


def push_instead(monkeypatch: pytest.MonkeyPatch, value: float, *trainers: int) -> None:
    """Let some trainers push this for the first element of the first bucket of round 2."""
    usual = trainer_messages.TrainerMessages._push

    def spoil(self: trainer_messages.TrainerMessages, node: Any, number: int, inputs: Sequence[Any]) -> None:
        if number == 2 and self.endpoint.number in trainers and node.attributes["server"] == 0:
            inputs = [np.array(each) for each in inputs]
            inputs[0].reshape(-1)[0] = value
        usual(self, node, number, inputs)

    monkeypatch.setattr(trainer_messages.TrainerMessages, "_push", spoil)


@pytest.mark.parametrize(
    ("value", "trainers", "said"),
    [
        (np.nan, [1], r"trainer 1 pushed nan for fc\S+ \(key .*\) in round 2: the round is not applied"),
        (3e38, [0, 1, 2], r"the merged gradient of fc\S+ \(key .*\) overflows in round 2: the round is not applied"),
    ],
)
def test_a_round_that_is_no_number_is_skipped_by_all_servers(
    value: float, trainers: list[int], said: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    play(replace(job, steps=2, checkpoint=tmp_path / "plain"))
    push_instead(monkeypatch, value, *trainers)
    lines: list[str] = []
    found: list[ServerSummary] = []
    skips = FaultOptions(nan=OnNan.SKIP, tell=lines.append, summarise=found.extend)
    told = play(replace(job, steps=3, checkpoint=tmp_path / "kept"), faults=skips)
    assert len(told) == 3 and len(lines) == 1 and re.fullmatch(said, lines[0]), lines
    for endpoint in (3, 4):
        assert states(tmp_path / "plain", 2, endpoint) == states(tmp_path / "kept", 3, endpoint)
    assert [each.skipped for each in found] == [1, 1]


@pytest.mark.parametrize("fixture", ["mlp_adamw_fp16_scaler"])
def test_skip_is_refused_where_the_update_handles_infinities(fixture: str, tmp_path: Path) -> None:
    api.split(source(fixture), SplitOptions(trainers=2, servers=1)).write(tmp_path / "split")
    plan = ServerJob.read(Job(folder=tmp_path / "split", data="", steps=1)).plan
    with pytest.raises(OptionError, match="--nan skip: the update itself handles infinite gradients"):
        FaultOptions(nan=OnNan.SKIP).check(plan)
    FaultOptions(nan=OnNan.ABORT).check(plan)


@pytest.mark.parametrize("aborts", [False, True])
def test_a_gradient_that_is_no_number(job: Job, aborts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    push_instead(monkeypatch, np.nan, 1)
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
