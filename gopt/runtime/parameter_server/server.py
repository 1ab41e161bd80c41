"""A server in rounds: it waits for what all trainers push, updates once, and answers pulls of the new version.

A version is the number of rounds whose updates a value has. A pull names the version that it wants, so that no trainer
gets an earlier or a mixed one; it is answered once that round is over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.artifact.server_entries import KeyEntry
from gopt.collectives.layout import parse_shapes
from gopt.collectives.table import COLLECTIVES
from gopt.errors import RunError
from gopt.ir.graph import Node
from gopt.ir.types import numpy_dtype
from gopt.parameter_server.views import ROUND
from gopt.runtime.device import Host
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.merge import Contribution, merge
from gopt.runtime.messages.endpoint import Endpoint, Sent
from gopt.runtime.messages.failures import Awaited, LostError
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.contributions import Contributions
from gopt.runtime.parameter_server.faults import refuse_not_finite
from gopt.runtime.parameter_server.job import EndpointEngine, ServerJob, agree, get_ready
from gopt.runtime.parameter_server.keeping import Keeping
from gopt.runtime.parameter_server.server_rows import merged_rows, part_of, rows_answer, table_parts
from gopt.runtime.parameter_server.server_tables import ServerTables
from gopt.runtime.parameter_server.waits import ServerSummary, Waits
from gopt.runtime.session import Array, array_dtype
from gopt.runtime.training.hyper_parameters import hyper_parameters
from gopt.runtime.tuning.tuning import tuning_of


@dataclass(slots=True)
class Trainers:
    """Who still takes part. ``ended``: trainer -> the rounds that it has ended; ``signal``: why they stopped, or 0."""

    live: set[int]
    ended: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    signal: int = 0


class SyncServer:
    """One server of a synchronous split. ``continues``: whether rounds go on without a trainer that is lost."""

    def __init__(
        self,
        server_job: ServerJob,
        endpoint: Endpoint,
        position: Callable[[int, int], None],
        *,
        continues: bool = False,
    ) -> None:
        self.server_job, self.endpoint, self._position = server_job, endpoint, position
        self._continues = continues
        job, manifest = server_job.job, server_job.manifest
        self.number = endpoint.number - server_job.trainers
        self.entry = server_job.entry(endpoint.number)
        self.keeping = Keeping(server_job, endpoint.number)
        graphs = server_job.graphs(endpoint.number)
        self.graph = graphs["step"]
        self._device = Host(tuning_of(job.tuning))
        start = self.keeping.load() if job.resume else None
        self.version = self.keeping.step
        self.tables = ServerTables(server_job, endpoint.number)
        self.held: dict[str, Any] = self.tables.initial(graphs, job.state) if start is None else start
        for number in self.tables.lazy:
            self.graph = self.tables.take_out(number, self.graph, self.held, merges=True)
        self._touched: dict[int, Array] = {}
        """Table whose updates run on touched rows -> those of this round."""
        self._hyper = [each for each in hyper_parameters(manifest, job.settings) if each.name in self.graph.inputs]
        self._buckets = server_job.plan.buckets
        self._tables = table_parts(server_job.plan.tables, self.number)
        self.trainers = Trainers(set(range(server_job.trainers)))
        self.contributions = Contributions(self.version)
        self.outputs: dict[str, Array] = {}
        """Numbers that the last round computed beside the states."""
        self._pulls: list[Message] = []
        self._calls = 0
        """Calls among servers that were made in this round: all make the same ones in the same order."""
        self._partials: dict[tuple[int, int], dict[int, Message]] = {}
        self._totals: dict[tuple[int, int], Message] = {}
        self._leaving: list[Sent] = []
        self.waits = Waits()
        self.answered = self.bytes_in = self.bytes_out = 0

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve rounds until all trainers have left."""
        agree(self.endpoint, self.server_job)
        self.endpoint.spare(range(1, self.server_job.trainers) if self._continues else ())
        engine = EndpointEngine(self.endpoint)
        with self.keeping.open(engine):
            self._compile()
            get_ready(self.endpoint)
            self._forget_lost()
            while self._round_comes():
                self._position(self.version, -1)
                self._round()
                if self.keeping.due(self.version):
                    self._save(engine)
            self._flush()
            self.keeping.finish(engine, self.version, lambda: self._save(engine))
        engine.gather(self.summary())
        self.endpoint.close()

    def _compile(self) -> None:
        replaces = {state.output: state.input for state in self.entry.state if state.input in self.held}
        plan = plan_execution(self.graph, replaces, self._device)
        self.program = Executor(plan, self._device.sessions())
        self.program.bind_states(self.held)
        self.held = {name: self._device.hold(array) for name, array in self.held.items()}

    def summary(self) -> ServerSummary:
        """What this server did in the run."""
        return ServerSummary(
            self.number, self.waits.rounds, self.answered, self.bytes_in, self.bytes_out, self.contributions.dropped,
            self.waits.seconds, self.waits.last,
        )  # fmt: skip

    def _round(self) -> None:
        feeds: dict[str, Array] = {each.name: each.at(self.version) for each in self._hyper}
        feeds[ROUND] = np.array(self.version, np.int64)
        shown = self.program.advance(self.held, feeds, self._call)
        for number, ids in self._touched.items():
            self.tables.touched[number].put(ids, shown)
        kept = self.graph.outputs.keys() - self.tables.updated
        self.outputs = {name: np.array(self._device.to_host(shown[name])) for name in shown if name in kept}
        self.contributions.next_round()
        self.version += 1
        self._calls = 0
        self.waits.end_round()
        self._answer()

    def _save(self, engine: EndpointEngine) -> None:
        self._flush()
        held = self.held | {name: self._device.hold(array) for name, array in self.tables.arrays().items()}
        self.keeping.save(engine, self.version, held, lambda value: self._device.to_host(self._device.view(value)))
        self._forget_lost()

    def _forget_lost(self) -> None:
        """Trainers that were lost while all came together take no part any more."""
        for number in self.endpoint.dropped & self.trainers.live:
            self.trainers.live.discard(number)
            self.trainers.lost[number] = self.endpoint.why_lost(number)

    def _round_comes(self) -> bool:
        """Wait for the first sign of the next round; False once all trainers have left."""
        self._answer()
        while True:
            going = [trainer for trainer in self.trainers.live if self.trainers.ended.get(trainer, 0) <= self.version]
            if self.contributions.any() or any(end > self.version for end in self.trainers.ended.values()):
                return True
            if not going:
                return False
            self._receive(tuple(going), f"begin round {self.version}")

    # --- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, sources: Sequence[int], what: str) -> None:
        """Take in one message; forget a trainer that is lost, where rounds go on without."""
        try:
            message = self.endpoint.receive(awaited=lambda: Awaited(tuple(sources), what))
        except LostError as error:
            if not self._continues or not 0 < error.number < self.server_job.trainers:
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
            self.trainers.ended[message.source] = message.round + 1
        elif message.kind is Kind.BYE:
            self.trainers.live.discard(message.source)
            self.trainers.signal = self.trainers.signal or int(message.note or 0)
        elif message.kind is Kind.PARTIAL:
            self._partials.setdefault((message.round, message.key), {})[message.source] = message
        elif message.kind is Kind.TOTAL:
            self._totals[message.round, message.key] = message
        else:
            raise RunError(f"{message.header} is no message to a server")

    def _answer(self) -> None:
        """Answer the pulls of versions that are there."""
        waiting, self._pulls = self._pulls, []
        for message in waiting:
            if message.round > self.version:
                self._pulls.append(message)
            else:
                self._leaving = [sent for sent in self._leaving if not sent.done]
                values = self._values(message)
                self.bytes_out += values.header.nbytes
                self._leaving.append(self.endpoint.isend(message.source, values))
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
        arrays = [each if each.dtype == dtype else each.astype(dtype) for each in arrays]
        return self.endpoint.message(Kind.VALUES, message.key, message.round, arrays)

    def _rows(self, message: Message) -> Array:
        """The rows that a pull asks for."""
        part = part_of(self._tables, message.key, message.source)
        if (table := self.tables.touched.get(message.key)) is not None:
            return rows_answer(part, table.stores[part.input].take, message)
        state = self._device.to_host(self._device.view(self.held[part.input]))
        return rows_answer(part, state.reshape(part.rows, part.columns).__getitem__, message)

    def _value(self, key: KeyEntry) -> Array:
        if not key.inputs:
            return self.outputs[key.outputs[0]]
        return self._device.to_host(self._device.view(self.held[key.inputs[0]]))

    def _flush(self) -> None:
        for sent in self._leaving:
            sent.wait()
        self._leaving.clear()

    # --- calls of the graph -----------------------------------------------------------------------------------------

    def _call(self, index: int, node: Node, inputs: list[Array], buffer: Any = None) -> list[Array]:
        self._position(self.version, index)
        if node.op_type == "Aggregate":
            return self._aggregate(node)
        if node.op_type == "AggregateRows":
            return self._aggregate_rows(node)
        if node.op_type == "AllReduce":
            return self._all_reduce(node, inputs)
        raise RunError(f"servers make no {node.op_type}")

    def _aggregate(self, node: Node) -> list[Array]:
        """Wait for the trainers' contributions to a bucket, and merge them."""
        bucket = int(node.attributes["bucket"])
        what = f"push bucket {bucket} ({', '.join(node.attributes['keys'])}) of round {self.version}"
        found = self._contributions(bucket, Kind.PUSH, what)
        shapes = parse_shapes(node.attributes["shapes"])
        return merge(found, node.attributes["reduce"], node.attributes["dtype"], shapes)

    def _aggregate_rows(self, node: Node) -> list[Array]:
        """Wait for the rows that trainers push of a table, and merge them."""
        table = int(node.attributes["table"])
        what = f"push rows of table {node.attributes['parameter']} of round {self.version}"
        found = merged_rows(self._tables[table], node, self._contributions(table, Kind.PUSH_ROWS, what))
        if (touched := self.tables.touched.get(table)) is not None:
            self._touched[table] = found[0]
            found += touched.take(found[0]).values()
        return found

    def _contributions(self, key: int, kind: Kind, what: str) -> dict[int, Contribution]:
        """Wait until all trainers that take part have pushed; raises RunError for one that will not."""
        held = self.contributions
        while missing := [each for each in sorted(self.trainers.live) if each not in held.of(key, kind)]:
            silent = next((each for each in missing if self.trainers.ended.get(each, 0) > self.version), None)
            if silent is not None:
                raise RunError(f"trainer {silent} ended round {self.version} and did not {what}")
            begun = self.waits.clock()
            self._receive(missing, what)
            self.waits.add(missing, len(self.trainers.live), begun)
        found = held.of(key, kind)
        if not found:
            raise RunError(f"no trainer is left to {what}")
        if self.server_job.faults.nan_aborts:
            refuse_not_finite(found, self._buckets[key] if kind is Kind.PUSH else (), self.version, what)
        return found

    def _all_reduce(self, node: Node, inputs: list[Array]) -> list[Array]:
        """A reduction among servers: server 0 combines in the order of servers, and all get its result."""
        index = self._calls
        self._calls += 1
        first, count = self.server_job.server(0), self.server_job.servers
        key = self.version, index
        arrays = [np.array(each) for each in inputs]
        if self.number:
            self.endpoint.send(first, self.endpoint.message(Kind.PARTIAL, index, self.version, arrays))
            while key not in self._totals:
                self._receive((first,), f"complete call {index} of round {self.version}")
            return list(self._totals.pop(key).arrays)
        others = [self.server_job.server(number) for number in range(1, count)]
        while missing := [each for each in others if each not in self._partials.get(key, {})]:
            self._receive(missing, f"give their part of call {index} of round {self.version}")
        came = self._partials.pop(key, {})
        parts = [arrays, *(list(came[each].arrays) for each in others)]
        results = COLLECTIVES["AllReduce"].execute(node.attributes, parts, array_dtype(arrays[0]))
        for other, result in zip(others, results[1:], strict=True):
            self.endpoint.send(other, self.endpoint.message(Kind.TOTAL, index, self.version, result or ()))
        return results[0] or []
