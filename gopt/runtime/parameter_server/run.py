"""Runs all endpoints of a split as threads of this process, or the endpoints of one process of many."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from gopt.artifact.server_entries import Mode
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.mpi import MpiHub
from gopt.runtime.messages.order import Order, Recorded
from gopt.runtime.messages.roster import Settings
from gopt.runtime.messages.threads import ThreadHub, run_threads
from gopt.runtime.parameter_server.async_server import AsyncServer
from gopt.runtime.parameter_server.async_trainer import AsyncTrainer
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.server import SyncServer
from gopt.runtime.parameter_server.sync_point import SyncReport
from gopt.runtime.parameter_server.trainer import CHIEF, PushPullTrainer
from gopt.runtime.training.job import Progress


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions called by a run beside ``on_step``.

    ``on_start``: called before the first step. ``position``: called with step and message whenever they change.
    ``stop_signal``: returns the signal received by this process, or 0. ``on_end``: called by the chief of a run without
    rounds, with the counts of all endpoints. ``server``: makes a server without rounds."""

    on_start: Callable[[], None] = lambda: None
    position: Callable[[int, int], None] = lambda *_: None
    stop_signal: Callable[[], int] = lambda: 0
    on_end: Callable[[SyncReport], None] = lambda report: None
    server: Callable[..., AsyncServer] = AsyncServer


OnStep = Callable[[Progress], None]
NO_HOOKS = Hooks()


def run_endpoint(
    server_job: ServerJob, endpoint: Endpoint, on_step: OnStep, hooks: Hooks = NO_HOOKS
) -> tuple[int, int]:  # fmt: skip
    """Run one endpoint; returns the last step, and the signal that ended the run, or 0."""
    rounds = server_job.plan.mode is Mode.SYNC
    if endpoint.number < server_job.trainers:
        make = PushPullTrainer if rounds else AsyncTrainer
        trainer = make(server_job, endpoint, hooks.position, stop_signal=hooks.stop_signal)
        trainer.run(on_step, hooks.on_start)
        if endpoint.number == CHIEF and isinstance(trainer, AsyncTrainer):
            hooks.on_end(trainer.report)
        return trainer.step, max(trainer.stopped, 0)
    server: SyncServer | AsyncServer
    if rounds:
        server = SyncServer(server_job, endpoint, hooks.position)
    else:
        server = hooks.server(server_job, endpoint, hooks.position, bound=server_job.faults.staleness)
    server.run()
    return server.version, max(server.trainers.signal, 0)


def run_endpoints(
    server_job: ServerJob, hub: ThreadHub | MpiHub, on_step: OnStep, hooks: Hooks = NO_HOOKS
) -> tuple[int, int]:  # fmt: skip
    """Run all endpoints of this process, each in a thread if several; returns the last step, and the signal that ended
    the run, or 0."""

    def work(number: int) -> tuple[int, int]:
        return run_endpoint(server_job, hub.endpoint(number), on_step, hooks)

    head, *rest = sorted(hub.mailboxes)
    failures: list[BaseException] = []

    def live(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            failures.append(error)
            hub.fail(number, error)

    threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in rest]
    for thread in threads:
        thread.start()
    try:
        result = work(head)
    except BaseException as error:
        hub.fail(head, error)
        raise failures[0] if failures else error from None
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return result


def run_in_threads(
    server_job: ServerJob, on_step: OnStep, hooks: Hooks = NO_HOOKS, *, deadline: float = 60.0,
    order: Order | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Run a split with a thread for each endpoint; returns the last step, and the signal that ended the run, or 0.

    ``order``: of received messages; a recorded run lost no trainer, so no trainer may be lost in its order."""
    hub = ThreadHub(server_job.roster(), Settings(deadline=deadline), order)
    spares = server_job.faults.continues or server_job.plan.mode is not Mode.SYNC
    spares = spares and not isinstance(order, Recorded)

    results = run_threads(
        hub, lambda endpoint: run_endpoint(server_job, endpoint, on_step, hooks),
        lambda number: spares and CHIEF < number < server_job.trainers,
    )  # fmt: skip
    assert results[0] is not None
    return results[0]
