"""A trainer without rounds: waits for others only in mode half-async, at checkpoints and at the end.

Before trainers synchronise, each tells the servers; these serve pushes and pulls until the last trainer has told
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gopt.artifact.server_entries import Mode
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.faults import OUT_OF_DATA, StopFault
from gopt.runtime.parameter_server.job import EndpointEngine, ServerJob, agree
from gopt.runtime.parameter_server.run_record import keep_record
from gopt.runtime.parameter_server.sync_point import SyncReport, synchronise
from gopt.runtime.parameter_server.trainer import CHIEF, PushPullTrainer
from gopt.runtime.training.job import Progress


class AsyncTrainer(PushPullTrainer):
    """One trainer of an asynchronous split.

    In mode half-async the trainer waits for the other trainers after every step, once servers have applied its pushes.
    Otherwise the chief reports the chief's loss. ``spread``: the largest difference between versions of keys in one
    step's pulls."""

    def __init__(
        self, server_job: ServerJob, endpoint: Endpoint, position: Callable[[int, int], None],
        *, stop_signal: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        super().__init__(server_job, endpoint, position, stop_signal=stop_signal)
        self._continues = True
        self.report = SyncReport()
        """The combined report of the last synchronisation point."""
        self.spread = 0
        self._versions: list[int] = []
        self._applied: dict[int, int] = {}
        """Server -> the last round whose pushes it has applied."""
        self.messages.noted = self._noted
        self._waits = server_job.plan.mode is Mode.HALF_ASYNC

    def run(self, on_step: Callable[[Progress], None], on_start: Callable[[], None] = lambda: None) -> None:
        """Run all steps of the job, or the steps until a trainer receives a signal."""
        agree(self.endpoint, self.server_job)
        self.endpoint.tolerate_loss(range(1, self.server_job.trainers) if self._continues else ())
        engine = EndpointEngine(self.endpoint)
        with self.checkpoints.open(engine):
            self._compile()
            if self.endpoint.number == CHIEF:
                on_start()
            last = self.server_job.job.steps
            while not self.report.leaving:
                while self.step < last and not self.stopped and self._has_data():
                    self._step(on_step)
                    if self.checkpoints.due(self.step):
                        break
                self.report = self._synchronise(engine)
                self._notice_lost()
                if self.data.idle:
                    self.step = self.report.step
                if not self.report.leaving:
                    self._save(engine)
            self.step, self.stopped = self.report.step, self.report.signal
            self.checkpoints.finish(engine, self.step, lambda: self._save(engine))
        keep_record(self.endpoint, self.server_job, self._host_states, self.report.signal)
        self.endpoint.close()

    def _look_ahead(self, ready: Sequence[Any]) -> None:
        if self._waits:
            super()._look_ahead(ready)

    def _has_data(self) -> bool:
        """Return whether this trainer continues. In mode half-async a trainer without data continues without
        computing steps."""
        if self._waits or self._more():
            return True
        ends = self._faults.stop is StopFault.FIRST
        number = self.endpoint.number
        if number not in self._step_end.exhausted:
            self._step_end.exhausted.add(number)
            end = ": the run ends" if ends else ""
            self._faults.tell(f"trainer {number} has no more data after step {self.step}{end}")
        self.stopped = OUT_OF_DATA if ends else 0
        return False

    def _synchronise(self, engine: EndpointEngine) -> SyncReport:
        self._set_call(-1)
        ends = self.step >= self.server_job.job.steps or bool(self.stopped)
        mine = SyncReport(self.step, ends, self.stopped, self.spread, self.data.idle)
        for number in range(self.server_job.servers):
            message = self.endpoint.message(Kind.SAVE, 0, self.step, note=self.stopped)
            self.endpoint.send(self.server_job.server(number), message)
        return synchronise(engine, mine)

    def _noted(self, note: Any) -> None:
        """Read the notes of a server's answer: the versions of the keys, and whether another trainer stops."""
        self._versions += note["versions"]
        self.stopped = self.stopped or int(note["signal"])

    def _end_round(self, round_number: int) -> None:
        super()._end_round(round_number)
        if self._versions:
            self.spread = max(self.spread, max(self._versions) - min(self._versions))
            self._versions.clear()
        servers = [self.server_job.server(number) for number in range(self.server_job.servers)]
        while self._waits and (late := [server for server in servers if self._applied.get(server, -1) < round_number]):
            self._receive(tuple(late), f"apply what was pushed in round {round_number}")

    def _meet(self, losses: Mapping[str, float]) -> tuple[Mapping[str, float], ...]:
        if self._waits:
            return super()._meet(losses)
        self.stopped = self.stopped or self._stop_signal()
        return (losses,)

    def _other(self, message: Message) -> None:
        if message.kind is Kind.RELEASE and message.source >= self.server_job.trainers:
            self._applied[message.source] = message.round
        else:
            super()._other(message)
