"""Asynchronous runs: equal to sync with one trainer, to a serial interpreter with several; faults and restarts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_runs import Run, buckets, folder, interpret, interpret_geo, pieces, run_split
from async_steps import SourceUpdate
from seeded_order import Seeded

from gopt import api
from gopt.artifact.checkpoint_index import step_dir
from gopt.artifact.server_entries import Mode, PullAt
from gopt.runtime.messages.failures import LateError
from gopt.runtime.messages.message import Header, Kind, Message
from gopt.runtime.messages.order import Order, Recorded
from gopt.runtime.messages.roster import Settings
from gopt.runtime.messages.threads import ThreadHub
from gopt.runtime.parameter_server.async_server import AsyncServer
from gopt.runtime.parameter_server.async_trainer import AsyncTrainer
from gopt.runtime.parameter_server.job import EndpointEngine, ServerJob
from gopt.runtime.parameter_server.run import Hooks, run_in_threads
from gopt.runtime.parameter_server.server_tables import ServerTables
from gopt.runtime.parameter_server.sync_point import SyncReport
from gopt.runtime.training.job import Job, Progress


@pytest.fixture
def data(tmp_path: Path) -> str:
    random = np.random.default_rng(3)
    path = tmp_path / "data.npz"
    np.savez(path, x=random.normal(size=(64, 3)).astype("f4"), y=random.normal(size=(64, 2)).astype("f4"))
    return str(path)


def staleness(run: Run) -> dict[int, int]:
    found: dict[int, int] = {}
    for server in run.servers.values():
        for late, count in server.usage.staleness.items():
            found[late] = found.get(late, 0) + count
    return found


@pytest.mark.parametrize("pull", [PullAt.START, PullAt.END])
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.HALF_ASYNC])
def test_with_one_trainer_it_is_sync_to_the_bit(mode: Mode, pull: PullAt, tmp_path: Path, data: str) -> None:
    told: list[Progress] = []
    sync = folder(tmp_path, trainers=1, mode=Mode.SYNC)
    run_in_threads(ServerJob.read(Job(folder=sync, data=data, steps=5)), told.append)
    run = run_split(folder(tmp_path, trainers=1, mode=mode, pull=pull), data, 5)
    assert run.losses == [each.losses[0] for each in told]
    assert staleness(run).keys() == {0}


@pytest.mark.parametrize("given", [{"accumulate": 2}, {"wire": "float16"}])
def test_micro_steps_and_narrow_wires_are_those_of_sync(given: dict[str, object], tmp_path: Path, data: str) -> None:
    told: list[Progress] = []
    sync = folder(tmp_path, trainers=1, mode=Mode.SYNC, **given)
    run_in_threads(ServerJob.read(Job(folder=sync, data=data, steps=3)), told.append)
    run = run_split(folder(tmp_path, trainers=1, **given), data, 3)
    assert run.losses == [each.losses[0] for each in told]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_recorded_order_gives_the_bits_of_a_serial_interpreter(seed: int, tmp_path: Path, data: str) -> None:
    split = folder(tmp_path)
    run = run_split(split, data, 4, order=Seeded(seed))
    training = api.load(tmp_path / "step.onnx").training
    held = interpret(run, training, SourceUpdate(training), data)
    for name, found, wanted in pieces(run, held):
        assert found == wanted, name
    assert max(staleness(run)) > 0
    again = run_split(split, data, 4, order=Recorded(run.arrivals))
    assert again.states() == run.states()


def test_another_order_gives_other_bits(tmp_path: Path, data: str) -> None:
    split = folder(tmp_path)
    states = [run_split(split, data, 3, order=Seeded(seed)).states() for seed in (0, 1)]
    assert states[0] != states[1]


class InTurn(Seeded):
    """Servers go on where no trainer can, and take messages of trainer 0 first."""

    def pick(self, numbers: Sequence[int]) -> int:
        return min(numbers)

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        return min(head.source for head in heads)


@pytest.mark.parametrize("order", [Seeded(1), InTurn(0)])
def test_half_async_trainers_see_all_of_the_step_before(order: Order, tmp_path: Path, data: str) -> None:
    seen: list[tuple[int, list[int]]] = []

    class Watched(AsyncTrainer):
        def _noted(self, note: Any) -> None:
            seen.append((self.step, note["versions"]))
            super()._noted(note)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_runs.AsyncTrainer", Watched)
        run = run_split(folder(tmp_path, trainers=3, mode=Mode.HALF_ASYNC), data, 3, order=order)
    assert len(run.losses) == 3 and seen
    assert all(min(versions) >= 3 * step for step, versions in seen)
    for server in run.servers.values():
        assert {key.version for key in server.keys.values()} == {9}


@pytest.mark.parametrize("pull", [PullAt.START, PullAt.END])
def test_a_bound_holds_the_fast_back(pull: PullAt, tmp_path: Path, data: str) -> None:
    split = folder(tmp_path, servers=1, pull=pull)
    job = ServerJob.read(Job(folder=split, data=data, steps=9))
    hub = ThreadHub(job.roster(), Settings(deadline=5))
    server = AsyncServer(job, hub.endpoint(2), lambda *_: None, bound=1)
    (bucket,) = buckets(server)

    def send(trainer: int, kind: Kind, round_number: int) -> int:
        endpoint = hub.endpoint(trainer)
        note = {"dtype": "float32"} if kind is Kind.PULL else None
        endpoint.isend(2, endpoint.message(kind, bucket, round_number, note=note))
        server._receive()
        return server.usage.answered

    later = int(pull is PullAt.END)  # the version behind a round
    assert [send(0, Kind.PULL, later), send(0, Kind.BARRIER, 0), send(0, Kind.PULL, 1 + later)] == [1, 1, 2]
    assert [send(0, Kind.BARRIER, 1), send(0, Kind.PULL, 2 + later)] == [2, 2]
    assert send(1, Kind.BARRIER, 0) == 3
    assert [send(0, Kind.BARRIER, 2), send(0, Kind.PULL, 3 + later)] == [3, 3]
    server._without(1)
    assert server.usage.answered == 4


def test_compensation_without_delay_is_none(tmp_path: Path, data: str) -> None:
    plain = run_split(folder(tmp_path, trainers=1), data, 4)
    other = run_split(folder(tmp_path, trainers=1, compensation=2.0), data, 4)
    assert plain.states() == other.states()


def test_compensation_acts_on_what_is_late(tmp_path: Path, data: str) -> None:
    plain = run_split(folder(tmp_path), data, 4, order=Seeded(0))
    other = run_split(folder(tmp_path, compensation=2.0), data, 4, order=Recorded(plain.arrivals))
    assert plain.states() != other.states()


@pytest.mark.parametrize("given", [{}, {"compensation": 1.0}, {"count": "push"}, {"mode": Mode.HALF_ASYNC}])
def test_a_resumed_run_goes_on_bit_for_bit(given: dict[str, object], tmp_path: Path, data: str) -> None:
    split = folder(tmp_path, trainers=1, **given)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    every = run_split(split, data, 5, checkpoint=whole, every=3)
    first = run_split(split, data, 3, checkpoint=parts)
    rest = run_split(split, data, 5, checkpoint=parts, resume=True)
    assert first.losses + rest.losses == every.losses
    assert rest.states() == every.states()


def test_counters_and_versions_of_keys_are_in_the_checkpoint(tmp_path: Path, data: str) -> None:
    split, target = folder(tmp_path, compensation=1.0), tmp_path / "checkpoint"
    first = run_split(split, data, 3, checkpoint=target, order=Seeded(2))
    again = run_split(split, data, 3, checkpoint=target, resume=True)
    for number, server in first.servers.items():
        for place, key in server.keys.items():
            other = again.servers[number].keys[place]
            assert (other.version, other.counting) == (key.version, key.counting)
            assert {name: float(value) for name, value in other.counters.items()} == {"step": 3.0}
            assert all(np.array_equal(other.backups[n], key.backups[n]) for n in (0, 1))


def test_a_trainer_that_dies_does_not_stop_the_others(tmp_path: Path, data: str) -> None:
    target = tmp_path / "checkpoint"
    run = run_split(folder(tmp_path, trainers=3), data, 5, failing=1, checkpoint=target, every=2)
    assert len(run.losses) == 5
    for server in run.servers.values():
        assert "out of power" in server.trainers.lost[1]
        assert {key.version for key in server.keys.values()} == {12}  # 5 of each of two, 2 of the lost one
    assert sorted(path.name for path in target.iterdir() if path.is_dir())


def test_a_trainer_that_dies_at_a_checkpoint_does_not_stop_it(tmp_path: Path, data: str) -> None:
    class Dead(EndpointEngine):
        """Comes to no gather: all others wait in it."""

        def gather(self, item: object) -> list[object]:
            with pytest.raises(LateError):  # virtual time: once nobody else can go on
                self.endpoint.receive(1.0)
            raise RuntimeError("out of power")

    class Dying(AsyncTrainer):
        def _synchronise(self, engine: EndpointEngine) -> SyncReport:
            return super()._synchronise(Dead(self.endpoint) if self.endpoint.number == 1 else engine)

    target = tmp_path / "checkpoint"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_runs.FailingTrainer", Dying)
        run = run_split(folder(tmp_path, trainers=3), data, 4, order=Seeded(0), failing=1, checkpoint=target, every=2)
    assert len(run.losses) == 4 and (target / step_dir(2)).is_dir() and (target / step_dir(4)).is_dir()
    assert all("out of power" in server.endpoint.why_lost(1) for server in run.servers.values())
    assert {key.version for server in run.servers.values() for key in server.keys.values()} == {10}  # 4 + 2 + 4


def test_a_trainer_that_dies_at_the_start_does_not_stop_the_others(tmp_path: Path, data: str) -> None:
    class Dying(AsyncTrainer):
        def _compile(self) -> None:
            if self.endpoint.number == 1:
                with pytest.raises(LateError):  # once all others wait for it
                    self.endpoint.receive(1.0)
                raise RuntimeError("out of power")
            super()._compile()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_runs.FailingTrainer", Dying)
        run = run_split(folder(tmp_path, trainers=3), data, 2, order=Seeded(0), failing=1)
    assert len(run.losses) == 2
    assert {key.version for server in run.servers.values() for key in server.keys.values()} == {4}


def test_a_push_is_applied_once_at_most(tmp_path: Path, data: str) -> None:
    class Twice(AsyncServer):
        def _push(self, message: Message) -> None:
            super()._push(message)
            late = Message(Kind.PUSH, message.source, message.key, max(message.round - 1, 0), message.arrays)
            super()._push(message)
            super()._push(late)

    split = folder(tmp_path, trainers=1)
    plain = run_split(split, data, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_runs.AsyncServer", Twice)
        twice = run_split(split, data, 3)
    assert twice.states() == plain.states() and twice.losses == plain.losses
    for server in twice.servers.values():
        assert server.usage.dropped == 2 * server.usage.accepted / max(len(server.keys), 1) * len(buckets(server))


@pytest.mark.parametrize("compensation", [None, 1.0])
def test_arrays_of_the_start_are_held_once(compensation: float | None, tmp_path: Path, data: str) -> None:
    """Behind the first update nothing but the backups of delay compensation has them."""
    starts: list[weakref.ref[np.ndarray]] = []
    usual = ServerTables.initial

    def initial(self: ServerTables, *given: Any) -> dict[str, np.ndarray]:
        found = usual(self, *given)
        starts.extend(weakref.ref(value) for value in found.values() if value.size > 1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServerTables, "initial", initial)
        run = run_split(folder(tmp_path, compensation=compensation), data, 2, order=Seeded(0))
    gc.collect()
    parameters = sum(len(server.keys) for server in run.servers.values())
    assert len(starts) == 2 * parameters  # and as many momenta
    assert len([each for each in starts if each() is not None]) == (parameters if compensation else 0)


def test_a_signal_to_one_trainer_ends_all(tmp_path: Path, data: str) -> None:
    split = folder(tmp_path)
    asked: list[int] = []

    def signal() -> int:
        asked.append(1)
        return 15 if len(asked) == 3 else 0

    job = Job(folder=split, data=data, steps=1000)
    step, stopped = run_in_threads(ServerJob.read(job), lambda progress: None, hooks=Hooks(stop_signal=signal))
    assert stopped == 15 and step < 1000


def test_geo_with_one_trainer_is_the_source(tmp_path: Path, data: str) -> None:
    told: list[Progress] = []
    sync = folder(tmp_path, trainers=1, mode=Mode.SYNC)
    run_in_threads(ServerJob.read(Job(folder=sync, data=data, steps=6)), told.append)
    losses = [each.losses[0] for each in told]
    run = run_split(folder(tmp_path, trainers=1, mode=Mode.GEO, every=1), data, 6)
    assert run.losses == losses
    run = run_split(folder(tmp_path, trainers=1, mode=Mode.GEO, every=3), data, 2)
    np.testing.assert_allclose(run.losses, [np.mean(losses[:3]), np.mean(losses[3:])], rtol=1e-7)


def test_geo_in_a_recorded_order_gives_the_bits_of_a_serial_interpreter(tmp_path: Path, data: str) -> None:
    split = folder(tmp_path, mode=Mode.GEO, every=2)
    run = run_split(split, data, 3, order=Seeded(3))
    training = api.load(tmp_path / "step.onnx").training
    served, local = interpret_geo(run, training, SourceUpdate(training), data)
    for name, wanted in served.items():
        assert run.parameter(name).tobytes() == wanted.tobytes(), name
    for number, states in local.items():
        for name, wanted in states.items():
            assert run.local(number, name).tobytes() == wanted.tobytes(), name


def test_geo_trainers_stay_near_one_another(tmp_path: Path, data: str) -> None:
    run = run_split(folder(tmp_path, trainers=3, mode=Mode.GEO, every=2), data, 12, order=Seeded(0))
    assert run.losses[-1] < run.losses[0]
    for name in ("w0", "b1"):
        whole = run.parameter(name)
        for trainer in run.trainers:
            assert np.abs(run.local(trainer, name).reshape(-1) - whole).max() < 0.5


def test_geo_goes_on_after_a_restart(tmp_path: Path, data: str) -> None:
    split = folder(tmp_path, trainers=1, mode=Mode.GEO, every=2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    every = run_split(split, data, 4, checkpoint=whole)
    first = run_split(split, data, 2, checkpoint=parts)
    rest = run_split(split, data, 4, checkpoint=parts, resume=True)
    assert first.losses + rest.losses == every.losses and rest.states() == every.states()
