"""A trainer of a split: pulls parameters, computes gradients on the trainer's batch, and pushes the gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gopt.artifact.server_entries import Mode, PullAt
from gopt.errors import RunError
from gopt.ir.graph import COMM, Graph, clone
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.types import numpy_dtype
from gopt.parameter_server.views import ROUND, ROUND_TYPE
from gopt.runtime.device import Host
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.failures import Awaited, LostError
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.faults import OUT_OF_DATA, StopFault
from gopt.runtime.parameter_server.job import EndpointEngine, ServerJob, agree, get_ready
from gopt.runtime.parameter_server.membership import IDLE
from gopt.runtime.parameter_server.split_checkpoints import SplitCheckpoints
from gopt.runtime.parameter_server.trainer_data import TrainerData
from gopt.runtime.parameter_server.trainer_messages import TrainerMessages
from gopt.runtime.parameter_server.waits import ServerSummary
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.training.hyper_parameters import hyper_parameters
from gopt.runtime.training.job import Progress, mean, not_finite, not_finite_error
from gopt.runtime.tuning.tuning import tuning_of

CHIEF = 0
"""The trainer whose local states count, and which reports."""


@dataclass(slots=True)
class _StepEnd:
    """Messages at the end of a step: on the chief the others' reports, elsewhere the chief's answer."""

    came: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict)
    released: dict[int, int] = field(default_factory=dict)
    """Step -> the signal for which the run ends, or 0."""
    lost: set[int] = field(default_factory=set)
    exhausted: set[int] = field(default_factory=set)
    """Trainers that have no more data."""


class PushPullTrainer:
    """One trainer. ``position`` is called with step and message whenever they change; ``stop_signal`` returns the
    signal received by this process, or 0.

    Raises InputError, OptionError and RunError for unusable files and options.
    """

    def __init__(
        self, server_job: ServerJob, endpoint: Endpoint, position: Callable[[int, int], None],
        *, stop_signal: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.server_job, self.endpoint, self._position = server_job, endpoint, position
        self._faults = server_job.faults
        self._stop_signal, self._continues = stop_signal, self._faults.continues
        job, manifest = server_job.job, server_job.manifest
        self.entry = server_job.entry(endpoint.number)
        self.checkpoints = SplitCheckpoints(server_job, endpoint.number)
        self.step = self.checkpoints.step
        self.stopped = 0
        self.call = -1
        self._step_end = _StepEnd()
        self.messages = TrainerMessages(server_job, endpoint, self._other, self._set_call, lambda *_: None)
        if server_job.plan.mode is Mode.SYNC:
            self.messages.pushed_all = self._end_round
        self._ended = self.step - 1
        """The last round that servers know to be pushed in full."""
        graphs = server_job.graphs(endpoint.number)
        self.graphs = {phase: self.messages.prepare(graph) for phase, graph in graphs.items()}
        self._hyper = hyper_parameters(manifest, job)
        self.data = TrainerData(server_job, endpoint.number, self.checkpoints.ahead)
        self._copies = [state for state in self.entry.state if state.copy and not state.local]
        states = [state for state in self.entry.state if not state.copy or state.local]
        loaded = self.checkpoints.load() if job.resume else None
        values = server_job.initial_states(endpoint.number, states, self.graphs) if loaded is None else loaded
        self.held: dict[str, Any] = values
        sums = {
            accumulator.input: np.zeros(accumulator.shape, numpy_dtype(accumulator.dtype))
            for accumulator in self.entry.accumulators
        }
        self.held.update(sums)
        self._device = Host(tuning_of(job.tuning))
        self.programs: dict[str, Executor] = {}

    def _set_call(self, call: int) -> None:
        self.call = call
        self._position(self.step, call)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self, on_step: Callable[[Progress], None], on_start: Callable[[], None] = lambda: None) -> None:
        """Run all steps of the job, or the steps until a signal; the chief calls ``on_step`` after each step."""
        agree(self.endpoint, self.server_job)
        self.endpoint.tolerate_loss(range(CHIEF + 1, self.server_job.trainers) if self._continues else ())
        engine = EndpointEngine(self.endpoint)
        with self.checkpoints.open(engine):
            self._compile()
            if self.endpoint.number == CHIEF:
                on_start()
            while self.step < self.server_job.job.steps and not self.stopped:
                self._step(on_step)
                if self.checkpoints.due(self.step):
                    self._save(engine)
            self._leave()
            self.checkpoints.finish(engine, self.step, lambda: self._save(engine))
        summaries = engine.gather(None)
        if self.endpoint.number == CHIEF:
            self._notice_lost()
            self._faults.summarise([summary for summary in summaries if isinstance(summary, ServerSummary)])
        self.endpoint.close()

    def _compile(self) -> None:
        """Compile the phases; when all endpoints have, pull the start values of this trainer's parameters."""
        cache = self._device.sessions()
        replaces = {state.output: state.input for state in self.entry.state}
        replaces |= {accumulator.output: accumulator.input for accumulator in self.entry.accumulators}
        for phase, graph in self.graphs.items():
            self.programs[phase] = Executor(plan_execution(graph, replaces, self._device), cache)
        ready = get_ready(self.endpoint, self._more())
        if self._copies:
            pulls = _pull_graph(self.graphs, [state.output for state in self._copies])
            program = Executor(plan_execution(pulls), SessionCache())
            self.messages.ask(pulls, self.step, "before")
            values = program.run({ROUND: np.array(self.step, np.int64)}, self.messages)
            self.held.update((state.input, np.array(values[state.output])) for state in self._copies)
        self._look_ahead(ready)
        for program in self.programs.values():
            program.bind_states(self.held)
        self.held = {name: self._device.hold(array) for name, array in self.held.items()}

    def _step(self, on_step: Callable[[Progress], None]) -> None:
        begin = time.perf_counter()
        before = self.messages.usage
        self._set_call(-1)
        manifest, round_number = self.server_job.manifest, self.step
        fed: dict[str, Array] = {parameter.name: parameter.at(self.step) for parameter in self._hyper}
        fed[ROUND] = np.array(round_number, np.int64)
        idle = self.data.idle
        micro_losses = {name: [] for name in manifest.losses} if idle else self._compute(fed, round_number)
        self._end_round(round_number)
        mine = {name: mean(values) for name, values in micro_losses.items()}
        if self.server_job.job.stop_on_nan and not idle and not_finite(mine):
            self.call = -1
            raise not_finite_error(mine, self.step)
        self.step += 1
        losses = self._meet(mine)
        if self.endpoint.number == CHIEF:
            count = self.data.samples * len(losses) * max(manifest.schedule.values())
            more = {name: round(value - before[name], 6) for name, value in self.messages.usage.items()}
            more |= self.data.epoch(self.step)
            on_step(Progress.of(self.step, losses, time.perf_counter() - begin, count, more))

    def _compute(self, fed: Mapping[str, Array], round_number: int) -> dict[str, list[float]]:
        """Run the phases of a step; returns each loss of the micro-steps."""
        manifest = self.server_job.manifest
        losses: dict[str, list[float]] = {name: [] for name in manifest.losses}
        if self.server_job.plan.pull is PullAt.START:
            for graph in self.graphs.values():
                self.messages.ask(graph, round_number, "before")
        for phase, count in manifest.schedule.items():
            program = self.programs[phase]
            for turn in range(count):
                feeds: Mapping[str, Array] = fed
                if self.data.feeds(self.graphs[phase]):
                    feeds = {**fed, **self.data.batch(self.step, turn)}
                shown = program.advance(self.held, feeds, self.messages)
                for name in losses.keys() & shown.keys():
                    losses[name].append(float(self._device.to_host(shown[name])))
        return losses

    def _end_round(self, round_number: int) -> None:
        """Tell every server, once, that this trainer has pushed the whole contribution to a round."""
        if round_number <= self._ended:
            return
        self._ended = round_number
        self.messages.flush()
        for number in range(self.server_job.servers):
            message = self.endpoint.message(Kind.BARRIER, 0, round_number, note=IDLE if self.data.idle else None)
            self.endpoint.send(self.server_job.server(number), message)

    # --- trainers among themselves ----------------------------------------------------------------------------------

    def _other(self, message: Message) -> None:
        """Accept a message that is not an answer of a server."""
        if message.kind is Kind.BARRIER:
            self._step_end.came[message.source, message.round] = message.note
        elif message.kind is Kind.RELEASE:
            self._step_end.released[message.round] = int(message.note)
        else:
            raise RunError(f"a trainer cannot receive {message.header}")

    def _meet(self, losses: Mapping[str, float]) -> tuple[Mapping[str, float], ...]:
        """Wait for the other trainers at the end of a step; returns their losses on the chief. All learn whether the
        run ends."""
        idle = self.data.idle
        numbers = [value if math.isfinite(value) else str(value) for value in losses.values()]
        note = {"losses": numbers, "signal": self._stop_signal(), "idle": idle, "more": self._more()}  # fmt: skip
        if self.endpoint.number != CHIEF:
            self.endpoint.send(CHIEF, self.endpoint.message(Kind.BARRIER, 0, self.step, note=note))
            while self.step not in self._step_end.released:
                self._receive((CHIEF,), f"end step {self.step}")
            self.stopped = self._step_end.released.pop(self.step)
            return ()
        while missing := [trainer for trainer in self._others() if (trainer, self.step) not in self._step_end.came]:
            self._receive(tuple(missing), f"end step {self.step}")
        notes = {CHIEF: note, **{trainer: self._step_end.came.pop((trainer, self.step)) for trainer in self._others()}}
        signal = next((int(note["signal"]) for note in notes.values() if note["signal"]), 0)
        self.stopped = signal or self._data_ends({number: bool(ended["more"]) for number, ended in notes.items()})
        for receiver in self._others():
            self.endpoint.send(receiver, self.endpoint.message(Kind.RELEASE, 0, self.step, note=self.stopped))
        told_all = [note["losses"] for note in notes.values() if not note["idle"]]
        rows = tuple(dict(zip(losses, map(float, row))) for row in told_all)
        return rows or (dict.fromkeys(losses, math.nan),)

    # --- data that ends ---------------------------------------------------------------------------------------------

    def _more(self) -> bool:
        """Return whether there is data for the next step; the data is read in advance where a run may end with it."""
        return self._faults.stop is None or self.step >= self.server_job.job.steps or self.data.take_ahead(self.step)

    def _look_ahead(self, ready: Sequence[Any]) -> None:
        """Before the first step: end the run where there is too little data for it. ``ready``: the values passed by all
        endpoints."""
        self.stopped = self._data_ends(dict(enumerate(map(bool, ready[: self.server_job.trainers]))))

    def _data_ends(self, more: Mapping[int, bool]) -> int:
        """OUT_OF_DATA where the run ends for lack of data, else 0; the chief reports the trainers out of data.
        ``more``: trainer -> whether data is left for the next step."""
        without = {number for number, has in more.items() if not has}
        ends = bool(without) and (self._faults.stop is StopFault.FIRST or len(without) == len(more))
        for number in sorted(without - self._step_end.exhausted):
            self._tell(f"trainer {number} has no more data after step {self.step}{': the run ends' if ends else ''}")
        self._step_end.exhausted |= without
        return OUT_OF_DATA if ends else 0

    def _tell(self, text: str) -> None:
        """Print a line on the chief only."""
        if self.endpoint.number == CHIEF:
            self._faults.tell(text)

    # --- participants -----------------------------------------------------------------------------------------------

    def _others(self) -> list[int]:
        return [trainer for trainer in range(1, self.server_job.trainers) if trainer not in self._step_end.lost]

    def _receive(self, sources: tuple[int, ...], what: str) -> None:
        try:
            self.messages.receive(lambda: Awaited(sources, what))
        except LostError as error:
            if not self._continues or error.number >= self.server_job.trainers or error.number == CHIEF:
                raise
            self.endpoint.drop(error.number)
            self._notice_lost()

    def _notice_lost(self) -> None:
        """Remove lost trainers; the chief reports each once."""
        for number in sorted(self.endpoint.dropped - self._step_end.lost):
            self._step_end.lost.add(number)
            self._tell(
                f"{self.endpoint.roster.describe(number)} is lost in step {self.step}: "
                f"{self.endpoint.why_lost(number)}; {len(self._others()) + 1} of {self.server_job.trainers} "
                "trainers go on"
            )

    # --- the end ----------------------------------------------------------------------------------------------------

    def _save(self, engine: EndpointEngine) -> None:
        self.checkpoints.save(engine, self.step, self.held, self._to_host)
        self._notice_lost()

    def _to_host(self, value: Any) -> Array:
        return self._device.to_host(self._device.view(value))

    def _host_states(self) -> dict[str, Array]:
        return {name: self._to_host(value) for name, value in self.held.items()}

    def _leave(self) -> None:
        """Announce that no more rounds follow."""
        self._set_call(-1)
        for number in range(self.server_job.servers):
            message = self.endpoint.message(Kind.BYE, 0, self.step, note=self.stopped)
            self.endpoint.send(self.server_job.server(number), message)


def _pull_graph(graphs: Mapping[str, Graph], outputs: list[str]) -> Graph:
    """The part of a trainer's graphs that pulls and joins values, for the start."""
    graph = next(graph for graph in graphs.values() if outputs[0] in graph.outputs)
    index = GraphIndex(graph)
    needed = set(walk(outputs, lambda name: index.operands(name, lambda node: node.domain != COMM)))
    nodes = []
    for node in graph.nodes:
        if needed.isdisjoint(node.outputs):
            continue
        copy = clone(node)
        if copy.domain == COMM:
            copy.inputs = [ROUND]
            copy._attributes = {**node.attributes, "version": "before"}
        nodes.append(copy)
    read = {name for node in nodes for name in node.reads}
    return replace(
        graph, nodes=nodes, inputs={ROUND: ROUND_TYPE}, outputs={name: graph.outputs[name] for name in outputs},
        initializers={name: tensor for name, tensor in graph.initializers.items() if name in read},
    )  # fmt: skip
