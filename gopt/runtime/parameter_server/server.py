"""A server with rounds: waits for the pushes of all trainers, updates once, and answers pulls of the new version.

A version is the number of rounds whose updates a value has. A pull names the wanted version, so that no trainer gets an
earlier or mixed version; the answer comes once the round is over. A skipped round makes a new version too, with the
values of the round before.

Usually the graph runs at once, and waits for each bucket at its first use. Where rounds can lose a contribution or be
skipped, all servers decide about a round together before their graphs run (``round_decision``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gopt.artifact.server_entries import KeyEntry
from gopt.collectives.table import COLLECTIVES
from gopt.errors import RunError
from gopt.ir.graph import Node
from gopt.ir.types import TensorType, numpy_dtype
from gopt.parameter_server.views import ROUND
from gopt.runtime.device import Host
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.host_value import array_dtype
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.failures import Awaited, LostError
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.contributions import Contributions
from gopt.runtime.parameter_server.faults import FaultLog, OnNan, refuse
from gopt.runtime.parameter_server.job import EndpointEngine, ServerJob, agree, get_ready
from gopt.runtime.parameter_server.membership import IDLE, Trainers
from gopt.runtime.parameter_server.outbox import Outbox
from gopt.runtime.parameter_server.round_decision import agree_on_contributors, agree_on_fault
from gopt.runtime.parameter_server.round_merge import RoundMerge
from gopt.runtime.parameter_server.server_exchange import HeldPart, ServerExchange
from gopt.runtime.parameter_server.server_rows import part_of, rows_answer, table_parts
from gopt.runtime.parameter_server.server_tables import ServerTables
from gopt.runtime.parameter_server.split_checkpoints import SplitCheckpoints
from gopt.runtime.parameter_server.waits import ServerSummary, Waits
from gopt.runtime.session import Array
from gopt.runtime.training.hyper_parameters import hyper_parameters
from gopt.runtime.tuning.tuning import tuning_of


class SyncServer:
    """One server of a synchronous split."""

    def __init__(self, server_job: ServerJob, endpoint: Endpoint, position: Callable[[int, int], None]) -> None:
        self.server_job, self.endpoint, self._position = server_job, endpoint, position
        self._faults = server_job.faults
        job, manifest = server_job.job, server_job.manifest
        self.number = endpoint.number - server_job.trainers
        self.entry = server_job.entry(endpoint.number)
        self.checkpoints = SplitCheckpoints(server_job, endpoint.number)
        graphs = server_job.graphs(endpoint.number)
        self.graph = graphs["step"]
        self._device = Host(tuning_of(job.tuning))
        start = self.checkpoints.load() if job.resume else None
        self.version = self.checkpoints.step
        self.tables = ServerTables(server_job, endpoint.number)
        self.held: dict[str, Any] = self.tables.initial(graphs) if start is None else start
        for number in self.tables.lazy:
            self.graph = self.tables.take_out(number, self.graph, self.held, merges=True)
        self._touched: dict[int, Array] = {}
        """Table whose updates run on touched rows -> this round's rows."""
        self._hyper = [
            parameter for parameter in hyper_parameters(manifest, job) if parameter.name in self.graph.inputs
        ]
        self._buckets = server_job.plan.buckets
        self._tables = table_parts(server_job.plan.tables, self.number)
        self.trainers = Trainers(set(range(server_job.trainers)))
        self.contributions = Contributions(self.version)
        self.waits = Waits()
        self._merge = RoundMerge(
            self._buckets, self._tables, self.contributions, self.trainers, self.waits, self._receive
        )  # fmt: skip
        self.outputs: dict[str, Array] = {}
        """Numbers that the last round computed beside the states."""
        self._pulls: list[Message] = []
        servers = [server_job.server(number) for number in range(server_job.servers)]
        self._exchange = ServerExchange(endpoint, servers, self._receive)
        self._outbox = Outbox(endpoint)
        self._tell = FaultLog(self._faults.tell if not self.number else lambda _: None)
        self.skipped = 0
        """Rounds that were not applied."""
        self.answered = self.bytes_in = self.bytes_out = 0

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve rounds until all trainers have left."""
        agree(self.endpoint, self.server_job)
        self.endpoint.tolerate_loss(range(1, self.server_job.trainers) if self._faults.continues else ())
        engine = EndpointEngine(self.endpoint)
        with self.checkpoints.open(engine):
            self._compile()
            get_ready(self.endpoint)
            self._forget_lost()
            while self._round_comes():
                self._position(self.version, -1)
                self._round()
                if self.checkpoints.due(self.version):
                    self._save(engine)
            self._outbox.flush()
            self.checkpoints.finish(engine, self.version, lambda: self._save(engine))
        engine.gather(self.summary())
        self.endpoint.close()

    def _compile(self) -> None:
        replaces = {state.output: state.input for state in self.entry.state if state.input in self.held}
        plan = plan_execution(self.graph, replaces, self._device)
        self.program = Executor(plan, self._device.sessions())
        self.program.bind_states(self.held)
        self.held = {name: self._device.hold(array) for name, array in self.held.items()}
        self._aggregates = [node for node in self.graph.nodes if node.op_type in ("Aggregate", "AggregateRows")]
        self._shown = [name for name in self.graph.outputs if name not in replaces and name not in self.tables.updated]

    def summary(self) -> ServerSummary:
        """Waits and counts of this server in the run."""
        return ServerSummary(
            self.number, self.waits.rounds, self.answered, self.bytes_in, self.bytes_out, self.contributions.dropped,
            self.waits.seconds, self.waits.last, self.skipped,
        )  # fmt: skip

    def _round(self) -> None:
        if self._decide():
            self._update()
        else:
            self.skipped += 1
            self.outputs = {name: _blank(self.graph.outputs[name]) for name in self._shown}
        self._merge.next_round()
        self.version += 1
        self.waits.end_round()
        self._answer()

    def _update(self) -> None:
        feeds: dict[str, Array] = {parameter.name: parameter.at(self.version) for parameter in self._hyper}
        feeds[ROUND] = np.array(self.version, np.int64)
        shown = self.program.advance(self.held, feeds, self._call)
        for number, ids in self._touched.items():
            self.tables.touched[number].put(ids, shown)
        self._touched.clear()
        self.outputs = {name: np.array(self._device.to_host(shown[name])) for name in shown if name in self._shown}

    def _save(self, engine: EndpointEngine) -> None:
        self._outbox.flush()
        states = self.held | {name: self._device.hold(array) for name, array in self.tables.arrays().items()}
        self.checkpoints.save(
            engine, self.version, states, lambda value: self._device.to_host(self._device.view(value))
        )
        self._forget_lost()

    def _forget_lost(self) -> None:
        """Remove trainers lost at a synchronisation point."""
        for number in self.endpoint.dropped & self.trainers.live:
            self.trainers.lose(number, self.endpoint.why_lost(number))

    def _round_comes(self) -> bool:
        """Wait for the first message of the next round; False once all trainers have left."""
        self._answer()
        while True:
            going = self.trainers.going(self.version)
            if self.contributions.any() or any(end > self.version for end in self.trainers.ended.values()):
                return True
            if not going:
                return False
            self._receive(tuple(going), f"begin round {self.version}")

    # --- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, sources: Sequence[int], what: str) -> None:
        """Receive one message; remove a lost trainer, where rounds continue without lost trainers."""
        try:
            message = self.endpoint.receive(awaited=lambda: Awaited(tuple(sources), what))
        except LostError as error:
            if not self._faults.continues or not 0 < error.number < self.server_job.trainers:
                raise
            self.endpoint.drop(error.number)
            self._forget_lost()
            return
        if message.kind in (Kind.PUSH, Kind.PUSH_ROWS):
            self.bytes_in += message.header.nbytes
            self.contributions.add(message)
        elif message.kind in (Kind.PULL, Kind.PULL_ROWS):
            self._pulls.append(message)
            self._answer()
        elif message.kind is Kind.BARRIER:
            self.trainers.end(message.source, message.round, idle=message.note == IDLE)
        elif message.kind is Kind.BYE:
            self.trainers.live.discard(message.source)
            self.trainers.signal = self.trainers.signal or int(message.note or 0)
        elif message.kind in (Kind.PARTIAL, Kind.TOTAL):
            self._exchange.take(message)
        else:
            raise RunError(f"a server cannot receive {message.header}")

    def _answer(self) -> None:
        """Answer the pulls of available versions."""
        waiting, self._pulls = self._pulls, []
        for message in waiting:
            if message.round > self.version:
                self._pulls.append(message)
            else:
                values = self._values(message)
                self.bytes_out += values.header.nbytes
                self._outbox.send(message.source, values)
                self.answered += 1

    def _values(self, message: Message) -> Message:
        """The answer to a pull."""
        if message.round < self.version:
            note = f"round {message.round} is over: server {self.number} is at round {self.version}"
            return self.endpoint.message(Kind.REFUSED, message.key, message.round, note=note)
        if message.kind is Kind.PULL_ROWS:
            rows = self._rows(message)
            return self.endpoint.message(Kind.ROWS, message.key, message.round, (rows,), {"pull": message.note["pull"]})
        dtype = numpy_dtype(message.note["dtype"])
        arrays = [self._value(key) for key in self._buckets[message.key]]
        arrays = [array if array.dtype == dtype else array.astype(dtype) for array in arrays]
        return self.endpoint.message(Kind.VALUES, message.key, message.round, arrays)

    def _rows(self, message: Message) -> Array:
        """The rows requested by a pull."""
        part = part_of(self._tables, message.key, message.source)
        if (table := self.tables.touched.get(message.key)) is not None:
            return rows_answer(part, table.stores[part.input].take, message)
        state = self._device.to_host(self._device.view(self.held[part.input]))
        return rows_answer(part, state.reshape(part.rows, part.columns).__getitem__, message)

    def _value(self, key: KeyEntry) -> Array:
        if not key.inputs:
            return self.outputs[key.outputs[0]]
        return self._device.to_host(self._device.view(self.held[key.inputs[0]]))

    # --- what a round has -------------------------------------------------------------------------------------------

    def _decide(self) -> bool:
        """Return whether the round is applied. Where servers decide together, wait until all trainers have ended the
        round, and agree on the contributors."""
        if not self._faults.decides_rounds:
            return True
        while missing := self.trainers.going(self.version):
            self._merge.wait(missing, f"end round {self.version}")
        complete = self.trainers.complete(self.version)
        decision = agree_on_contributors(self._exchange, self.version, complete, self.contributions.sources())
        self._merge.contributors = decision.trainers
        for trainer in decision.left_out:
            self._tell(f"round {self.version} goes without trainer {trainer}: not all that it pushed has come")
        if not decision.trainers:
            return False
        if self._faults.nan is not OnNan.SKIP:
            return True
        wrong = agree_on_fault(self._exchange, self.version, self._merge.ahead(self._aggregates))
        if wrong:
            self._tell(f"{wrong}: the round is not applied")
        return not wrong

    # --- calls of the graph -----------------------------------------------------------------------------------------

    def _call(self, index: int, node: Node, inputs: list[Array], buffer: Any = None) -> list[Array]:
        self._position(self.version, index)
        if node.op_type in ("Aggregate", "AggregateRows"):
            merged = self._merge.take(node)
            if self._faults.nan is OnNan.ABORT:
                refuse(self._merge.fault(node, merged))
            return [*merged, *self._touched_rows(node, merged)]
        if node.op_type == "AllReduce":
            return self._all_reduce(node, inputs)
        raise RunError(f"servers make no {node.op_type}")

    def _touched_rows(self, node: Node, merged: Sequence[Array]) -> Sequence[Array]:
        """The rows of a table, and of states of the same shape, read by an update on touched rows."""
        number = int(node.attributes["table"]) if node.op_type == "AggregateRows" else -1
        touched = self.tables.touched.get(number)
        if touched is None:
            return ()
        self._touched[number] = merged[0]
        return list(touched.take(merged[0]).values())

    def _all_reduce(self, node: Node, inputs: list[Array]) -> list[Array]:
        """A reduction over servers, in the order of server numbers."""

        def join(parts: list[HeldPart]) -> list[HeldPart]:
            arrays = [list(part.arrays) for part in parts]
            results = COLLECTIVES["AllReduce"].execute(node.attributes, arrays, array_dtype(arrays[0][0]))
            return [HeldPart(tuple(result or ())) for result in results]

        return list(self._exchange(self.version, HeldPart(tuple(np.array(array) for array in inputs)), join).arrays)


def _blank(type: TensorType) -> Array:
    """The value of a scalar computed by servers, in a round that was not applied: NaN in a floating type, else 0."""
    dtype = numpy_dtype(type.dtype)
    return np.full(type.dims, np.nan if dtype.kind in "fV" else 0, dtype)
