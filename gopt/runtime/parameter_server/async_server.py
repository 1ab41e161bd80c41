"""A server without rounds: every push is applied on arrival, and every pull gets the current values.

One thread does everything, so a key has one writer, and an answer has all keys of a bucket as of one moment between two
pushes. Messages of a trainer are received in the order of sending: a pull sees the trainer's earlier pushes. A push is
applied at most once: a push of a round no later than the last round of the same trainer and bucket is dropped and
counted.

At a checkpoint trainers stop, and servers have applied all pushes of earlier rounds and none of later rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gopt.artifact.server_entries import KeyEntry, Mode, PullAt
from gopt.errors import RunError
from gopt.ir.types import numpy_dtype
from gopt.parameter_server.blocks import TablePart
from gopt.runtime.device import Host
from gopt.runtime.memory import unpack_views
from gopt.runtime.merge import Contribution
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.failures import Awaited, LostError
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.faults import HINT, FaultLog, OnNan, not_finite
from gopt.runtime.parameter_server.job import EndpointEngine, ServerJob, agree, get_ready
from gopt.runtime.parameter_server.key_state import BlockState, KeyState
from gopt.runtime.parameter_server.membership import Trainers
from gopt.runtime.parameter_server.outbox import Outbox
from gopt.runtime.parameter_server.run_record import keep_record
from gopt.runtime.parameter_server.server_rows import table_parts
from gopt.runtime.parameter_server.server_tables import ServerTables
from gopt.runtime.parameter_server.split_checkpoints import SplitCheckpoints
from gopt.runtime.parameter_server.sync_point import SyncReport, Usage, synchronise
from gopt.runtime.parameter_server.table_state import TableState
from gopt.runtime.session import Array
from gopt.runtime.training.hyper_parameters import hyper_parameters
from gopt.runtime.tuning.tuning import tuning_of


class AsyncServer:
    """One server of an asynchronous split.

    ``continues``: whether the server continues without a lost trainer, unless the chief is lost. ``bound``: the rounds
    a trainer may be ahead of the slowest trainer before its pulls wait, or None. Raises InputError, OptionError and
    RunError for unusable files and options."""

    def __init__(
        self, server_job: ServerJob, endpoint: Endpoint, position: Callable[[int, int], None],
        *, continues: bool = True, bound: int | None = None,
    ) -> None:  # fmt: skip
        self.server_job, self.endpoint, self._position = server_job, endpoint, position
        self._continues, self._bound = continues, bound
        job, manifest, plan = server_job.job, server_job.manifest, server_job.plan
        self.number = endpoint.number - server_job.trainers
        self.entry = server_job.entry(endpoint.number)
        self.checkpoints = SplitCheckpoints(server_job, endpoint.number)
        self.version = self.checkpoints.step
        """The step at which all came together last."""
        graphs = server_job.graphs(endpoint.number)
        loaded = self.checkpoints.load() if job.resume else None
        tables = ServerTables(server_job, endpoint.number)
        states = tables.initial(graphs) if loaded is None else loaded
        hyper = hyper_parameters(manifest, job)
        blocks = server_job.blocks(self.number, graphs["step"], {parameter.name for parameter in hyper})
        device = Host(tuning_of(job.tuning))
        cache = device.sessions()
        self.keys = {
            block.key: KeyState(block, states, plan.count, hyper, device, cache) for block in blocks
            if isinstance(block.entry, KeyEntry)
        }  # fmt: skip
        parts = table_parts(plan.tables, self.number)
        self.tables = {
            block.key: TableState(block, parts[block.key], tables, states, plan.count, hyper, device, cache)
            for block in blocks if isinstance(block.entry, TablePart)
        }  # fmt: skip
        for state in self._held if loaded is not None else ():
            state.restore(self.checkpoints.load_extra)
        blocked = {name for block in blocks for name in (*block.states, *block.counters)}
        self._rest = {name: value for name, value in states.items() if name not in blocked}
        """States that no key has, as on a server without keys."""
        self._buckets: dict[int, list[KeyState]] = {}
        for number, key in self.keys.items():
            self._buckets.setdefault(plan.keys[number].bucket, []).append(key)
        self.trainers = Trainers(set(range(server_job.trainers)))
        self.usage = Usage()
        self._last: dict[tuple[int, Kind, int], int] = {}
        """Trainer and bucket or table -> the last round with an accepted push."""
        self._begun = dict.fromkeys(range(server_job.trainers), self.version)
        """Trainer -> the round that it is in."""
        self._come: set[int] = set()
        """Trainers that wait for all to come together."""
        self.report = SyncReport()
        self._held_back: list[Message] = []
        self._outbox = Outbox(endpoint)
        self._nan = server_job.faults.nan
        self._tell = FaultLog(server_job.faults.tell)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until all trainers have left."""
        agree(self.endpoint, self.server_job)
        self.endpoint.tolerate_loss(range(1, self.server_job.trainers) if self._continues else ())
        engine = EndpointEngine(self.endpoint)
        with self.checkpoints.open(engine):
            get_ready(self.endpoint)
            self._forget_lost()
            while not self.report.leaving:
                while not self.trainers.live <= self._come:
                    self._receive()
                self._come.clear()
                self.report = synchronise(engine, self.usage)
                self.version = self.report.step
                if not self.report.leaving:
                    self._save(engine)
                self._forget_lost()
            self._outbox.flush()
            self.checkpoints.finish(engine, self.version, lambda: self._save(engine))
        keep_record(self.endpoint, self.server_job, self.states, self.report.signal)
        self.endpoint.close()

    def _receive(self) -> None:
        try:
            message = self.endpoint.receive(awaited=lambda: Awaited(tuple(sorted(self.trainers.live)), "push or pull"))
        except LostError as error:
            if not self._continues or not 0 < error.number < self.server_job.trainers:
                raise
            self.endpoint.drop(error.number)
            self._without(error.number, error.message)
            return
        if message.kind in (Kind.PUSH, Kind.PUSH_ROWS):
            self._push(message)
        elif message.kind in (Kind.PULL, Kind.PULL_ROWS):
            self._held_back.append(message)
        elif message.kind is Kind.BARRIER:
            self._end_round(message)
        elif message.kind is Kind.SAVE:
            self._come.add(message.source)
            self.trainers.signal = self.trainers.signal or int(message.note)
        else:
            raise RunError(f"a server cannot receive {message.header}")
        self._answer()

    def _forget_lost(self) -> None:
        """Remove trainers lost at a synchronisation point: they send nothing more."""
        for number in self.endpoint.dropped & self.trainers.live:
            self._without(number, self.endpoint.why_lost(number))

    def _without(self, trainer: int, why: str = "") -> None:
        self.trainers.lose(trainer, why)
        self._held_back = [pull for pull in self._held_back if pull.source != trainer]
        self._answer()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _push(self, message: Message) -> None:
        slot = message.source, message.kind, message.key
        self._begun[message.source] = max(self._begun[message.source], message.round)
        if message.round <= self._last.get(slot, self.checkpoints.step - 1):
            self.usage.dropped += 1
            return
        self._last[slot] = message.round
        self._position(message.round, message.key)
        if message.kind is Kind.PUSH_ROWS:
            if self._has_bad_values(message, (), f"push rows of table {self._table(message).rows.name}"):
                self.usage.skipped += 1
                return
            self._note(self._table(message).push(message, max(len(self.trainers.live), 1)))
            return
        keys = self._bucket(message)
        if self._has_bad_values(
            message, [key.block.entry for key in keys if isinstance(key.block.entry, KeyEntry)], "push"
        ):
            self.usage.skipped += 1
            return
        parts = unpack_views(message.arrays[0].reshape(-1), [key.type.dims for key in keys])
        for key, part in zip(keys, parts, strict=True):
            self._note(key.push(message.source, part, max(len(self.trainers.live), 1)))

    def _end_round(self, message: Message) -> None:
        """A trainer has pushed all of a round."""
        self._begun[message.source] = max(self._begun[message.source], message.round + 1)
        if self.server_job.plan.mode is Mode.HALF_ASYNC:
            self._outbox.send(message.source, self.endpoint.message(Kind.RELEASE, 0, message.round, note=0))

    def _note(self, late: int) -> None:
        self.usage.staleness[late] += 1
        self.usage.accepted += 1

    def _has_bad_values(self, message: Message, keys: Sequence[KeyEntry], what: str) -> bool:
        """Return whether a push is dropped for a NaN or infinite value, in gradients of ``keys`` or of rows, the last
        arrays of a message. Raises RunError with --nan abort."""
        if self._nan is OnNan.PASS:
            return False
        wrong = not_finite({message.source: Contribution(message.arrays[-1])}, keys, message.round, what)
        if wrong and self._nan is OnNan.ABORT:
            raise RunError(wrong, HINT)
        if wrong:
            self._tell(f"{wrong}: the message is not applied")
        return bool(wrong)

    def _answer(self) -> None:
        """Answer the pulls of all trainers that are not too far ahead."""
        waiting, self._held_back = self._held_back, []
        for message in waiting:
            if self._bound is not None and self._ahead(message) > self._bound:
                self._held_back.append(message)
                continue
            self._outbox.send(
                message.source, self._rows(message) if message.kind is Kind.PULL_ROWS else self._values(message)
            )
            self.usage.answered += 1

    def _values(self, message: Message) -> Message:
        """The answer to a pull of a bucket."""
        dtype = numpy_dtype(message.note["dtype"])
        keys = self._bucket(message)
        arrays = [key.pull(message.source).astype(dtype, copy=False) for key in keys]
        note = {"versions": [key.version for key in keys], "signal": self.trainers.signal}
        return self.endpoint.message(Kind.VALUES, message.key, message.round, arrays, note)

    def _rows(self, message: Message) -> Message:
        """The answer to a pull of rows."""
        table = self._table(message)
        rows = table.pull(message)
        note = {"pull": message.note["pull"], "versions": [table.version], "signal": self.trainers.signal}
        return self.endpoint.message(Kind.ROWS, message.key, message.round, (rows,), note)

    def _ahead(self, message: Message) -> int:
        """The rounds by which the sender of a pull is ahead of the slowest continuing trainer."""
        # Rows are pulled as they are before the step, whenever parameters are.
        round_number = message.round - (self.server_job.plan.pull is PullAt.END and message.kind is Kind.PULL)
        rounds = [self._begun[trainer] for trainer in self.trainers.live - self._come if trainer != message.source]
        return round_number - min(rounds, default=round_number)

    def _table(self, message: Message) -> TableState:
        if message.key not in self.tables:
            raise RunError(
                f"server {self.number} received {message.header} for table {message.key}, and has no part of the table"
            )
        return self.tables[message.key]

    @property
    def _held(self) -> list[BlockState]:
        """All keys and parts of tables of this server."""
        return [*self.keys.values(), *self.tables.values()]

    def _bucket(self, message: Message) -> Sequence[KeyState]:
        if message.key not in self._buckets:
            raise RunError(
                f"server {self.number} received {message.header} for bucket {message.key}, which it does not have"
            )
        return self._buckets[message.key]

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, Array]:
        """All states of this server in the manifest. Counters come from the first key with counters."""
        states: dict[str, Any] = dict(self._rest)
        for state in reversed(self._held):
            states |= state.counters
        for state in self._held:
            states |= state.states
        return states

    def _save(self, engine: EndpointEngine) -> None:
        self._outbox.flush()
        extra: dict[str, Array] = {}
        for state in self._held:
            extra |= state.extra(self.server_job.trainers)
        self.checkpoints.save(engine, self.version, self.states(), np.asarray, extra)
