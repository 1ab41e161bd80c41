"""Holds what servers without rounds did against the source: each message by itself, from the states before it.

- What a trainer pushed in a round must be the source's gradients of its batch, at the parameters that it had pulled.
- What a server made of a push must be the source's update of that gradient, from the states that it had.

So nothing depends on the order but the counters, and rounding of earlier messages is not counted twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest_entries import InputKind
from gopt.artifact.pieces import Piece, cut, put
from gopt.ir.types import numpy_dtype
from gopt.runtime.executor import Executor
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.async_server import AsyncServer
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.parameter_server.key_state import BlockState
from gopt.runtime.session import SessionCache
from gopt.runtime.training.array_source import MicroStep
from gopt.runtime.training.data import BatchSource, open_data
from gopt.runtime.training.draws import DrawnInputs
from gopt.runtime.training.hyper_parameters import hyper_parameters
from gopt.verification.compare import Values, allowance, distance, finite, ratio
from gopt.verification.reference_graphs import subgraph, update_graph
from gopt.verification.reference_step import ReferenceProgram
from gopt.verification.replay.watched_server import BlockKey, WatchedServer
from gopt.verification.result import Difference, Verification
from gopt.verification.sensitivity import MOST, MULTIPLE, NOISE, RUNS, apart, norm, perturbed, units
from gopt.verification.source_members import run_source
from gopt.verification.variants import PLAIN

GRADIENTS, UPDATES = "gradients of each push", "update of each push"
"""Variants of the result."""


@dataclass(slots=True)
class _Round:
    """A round of a trainer: pulled and pushed values, by key, flat; ``ended``: the servers that know the end."""

    pulled: dict[BlockKey, np.ndarray] = field(default_factory=dict)
    pushed: dict[BlockKey, np.ndarray] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Count:
    """Accepted pushes of a key."""

    all: int = 0
    chief: int = 0

    def advances(self, rule: str, trainers: int) -> int:
        return self.chief if rule == "chief" else self.all if rule == "push" else self.all // trainers


class SourceReplay:
    """Compares servers with the source; ``server`` makes a watched server. Servers run one at a time."""

    def __init__(self, training: TrainingGraph, server_job: ServerJob, cache: SessionCache, result: Verification):
        self.training, self.server_job, self.result = training, server_job, result
        manifest, plan, job = server_job.manifest, server_job.plan, server_job.job
        self._plan, self._times = plan, max(manifest.schedule.values())
        self._reference = ReferenceProgram(training, manifest.mesh.mesh(), cache)
        self._source, self._cache = update_graph(training), cache
        self._updates: dict[BlockKey | tuple[int, int], Executor] = {}
        self._updated = {state.tensor: state.updated for state in training.states}
        self._hyper = hyper_parameters(manifest, job)
        self._types = {entry.name: entry.type for entry in manifest.inputs_of(InputKind.BATCH)}
        self._batches: dict[int, BatchSource] = {}
        types = training.graph.types
        self._empty = {
            state.tensor: np.zeros(types[state.tensor].dims, numpy_dtype(types[state.tensor].dtype))
            for state in training.states
        }  # fmt: skip
        self._whole = {name: value.copy() for name, value in self._empty.items()}
        """States of the source as the last update of each server found them."""
        self._trainers = [self._local_states(number) for number in range(server_job.trainers)]
        self._pieces: dict[int, dict[str, Piece]] = {
            number: {state.input: state.pieces[0] for state in server_job.entry(server_job.server(number)).state}
            for number in range(plan.servers)
        }
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._counts: dict[BlockKey, _Count] = {}
        self._held: dict[tuple[int, BlockKey], np.ndarray] = {}
        """Trainer and key -> the parameter as it pulled it last, where delays are compensated."""
        self._units = units(training)
        self._kinds = {state.tensor: state.kind.value for state in training.states}

    def _local_states(self, trainer: int) -> Values:
        """The local states of a trainer, at the start."""
        entry = self.server_job.entry(trainer)
        states = [state for state in entry.state if not state.copy or state.local]
        values = self.server_job.initial_states(trainer, states, self.server_job.graphs(trainer))
        local = {state.pieces[0].tensor: values[state.input] for state in states if state.pieces}
        return self._empty | {name: np.asarray(value).reshape(self._empty[name].shape) for name, value in local.items()}

    def server(self, *args: Any, **named: Any) -> AsyncServer:
        return WatchedServer(self, *args, **named)

    def finish(self) -> None:
        """Name rounds with a part never pushed, and values that no check has seen."""
        for (trainer, number), pending in self._rounds.items():
            if pending.pushed:
                self._differs(GRADIENTS, number, trainer, f"the pushes of trainer {trainer}", "message", float("inf"))
        if not self._counts:
            self.result.doubt("pushes", "no server applied any")

    # --- gradients --------------------------------------------------------------------------------------------------

    def pulled(self, message: Message, key: BlockKey, state: BlockState, value: np.ndarray, ids: Any = None) -> None:
        flat = self._rounds.setdefault((message.source, message.round), _Round()).pulled
        if ids is None:
            flat[key] = value.reshape(-1)
            self._held[message.source, key] = np.array(state.states[state.block.entry.inputs[0]]).reshape(-1)
            return
        part = flat.setdefault(key, np.zeros(self._pieces[key[0]][state.block.entry.inputs[0]].elements, value.dtype))
        part.reshape(-1, value.shape[-1] if value.ndim > 1 else 1)[ids] = value.reshape(ids.size, -1)

    def ended(self, message: Message, server: int) -> None:
        """When all servers know, the gradients of the round are compared."""
        key = message.source, message.round
        pending = self._rounds.setdefault(key, _Round())
        pending.ended.add(server)
        if len(pending.ended) == self._plan.servers:
            del self._rounds[key]
            if pending.pushed:
                self._compare_gradients(*key, pending)

    def _compare_gradients(self, trainer: int, number: int, pending: _Round) -> None:
        states = dict(self._trainers[trainer])
        for key, flat in pending.pulled.items():
            piece = self._piece(key)
            whole = states[piece.tensor] = np.array(states[piece.tensor])
            put(whole, piece.place, flat.astype(whole.dtype), piece.start)
        self._trainers[trainer] = states
        batches = [[self._batch(trainer, number, turn)] for turn in range(self._times)]
        settings = {hyper.name: np.array(hyper.at(number)) for hyper in self._hyper}
        local = self._reference.local(PLAIN, states, settings, batches)
        means = self._reference.means(local)
        floors = functools.cache(lambda: self._floors(states, settings, batches, means))
        for key, flat in pending.pushed.items():
            piece = self._piece(key)
            name = self.training.gradients[piece.tensor]
            wanted = cut(piece, means[name]).astype(flat.dtype)
            zero = np.zeros_like(wanted)
            floor = functools.partial(lambda name: floors()[name], name)
            self._hold(GRADIENTS, number, trainer, name, "gradient", flat, wanted, zero, floor)
        self._trainers[trainer] |= local.statistics[0]

    def _floors(self, states: Values, settings: Values, batches: list[list[Values]], means: Values) -> dict[str, float]:
        """The movement of each gradient by rounding, as allowed by ``gopt verify`` in rounds."""
        generator, moved = np.random.default_rng([0, 5]), dict.fromkeys(means, 0.0)
        for _ in range(RUNS):
            disturbed = {
                name: perturbed(value, self._units.get(name, 0.0), generator) for name, value in states.items()
            }
            again = self._reference.means(self._reference.local(PLAIN, disturbed, settings, batches))
            moved = {name: max(size, apart(means[name], again[name])) for name, size in moved.items()}
        sizes = {name: norm(mean) for name, mean in means.items()}
        return {
            name: MULTIPLE * change if sizes[name] * NOISE <= change else min(MULTIPLE * change, MOST * sizes[name])
            for name, change in moved.items()
        }

    def _batch(self, trainer: int, number: int, turn: int) -> Values:
        if trainer not in self._batches:
            job, axis = self.server_job.job, self.server_job.manifest.samples_axis
            order = job.order(self._times, axis, once=self.server_job.faults.stop is not None)
            drawn = DrawnInputs.of(self.server_job.manifest, self.server_job.seed)
            self._batches[trainer] = open_data(job.data, self._types, order, drawn)
        step = MicroStep(number * self._times + turn, trainer, self.server_job.trainers)
        return {name: np.array(value) for name, value in self._batches[trainer].batch(step).items()}

    def _piece(self, key: BlockKey) -> Piece:
        """The piece of a parameter under a key."""
        server, kind, number = key
        if kind is Kind.PUSH_ROWS:
            table = self._plan.tables[number]
            return self._pieces[server][table.inputs[table.servers.index(server)]]
        return self._pieces[server][self._plan.keys[number].inputs[0]]

    # --- updates ----------------------------------------------------------------------------------------------------

    def gave(self, message: Message, key: BlockKey, gradient: np.ndarray) -> None:
        self._rounds.setdefault((message.source, message.round), _Round()).pushed[key] = gradient

    def applied(
        self, message: Message, key: BlockKey, state: BlockState, before: Values, touched: np.ndarray | None
    ) -> None:  # fmt: skip
        pieces, block = self._pieces[key[0]], state.block
        for name, value in before.items():
            piece = pieces[name]
            put(self._whole[piece.tensor], piece.place, np.asarray(value).reshape(-1), piece.start)
        count = self._counts.setdefault(key, _Count())
        turn = count.advances(self._plan.count, self.server_job.trainers)
        count.all, count.chief = count.all + 1, count.chief + (message.source == 0)
        goes_on = count.advances(self._plan.count, self.server_job.trainers) > turn
        piece = self._piece(key)
        gradient = self._rounds[message.source, message.round].pushed[key]
        updated = self._update(key, state, turn, self._late(message.source, key, gradient, before, state))
        for name in before:
            piece, counter = pieces[name], name in block.counters
            wanted = cut(piece, updated[self._updated[piece.tensor]])
            old = np.asarray(before[name]).reshape(-1)
            if counter and not goes_on:
                wanted = old
            if touched is not None and not counter:
                wanted = np.where(np.repeat(touched, wanted.size // touched.size), wanted, old)
            value = state.counters[name] if counter else state.states[name]
            value = np.asarray(value).reshape(-1)
            rank, kind = self.server_job.server(key[0]), self._kinds[piece.tensor]
            self._hold(UPDATES, message.round, rank, piece.tensor, kind, value, wanted, old)

    def _late(
        self, trainer: int, key: BlockKey, gradient: np.ndarray, before: Values, state: BlockState
    ) -> np.ndarray:  # fmt: skip
        """The gradient of a push's update: with delay compensation g + strength (w - w') g²."""
        strength = self._plan.compensation
        if strength is None:
            return gradient
        now = np.asarray(before[state.block.entry.inputs[0]]).reshape(-1)
        pulled = self._held.get((trainer, key), now)
        g, back = gradient.astype(np.float64), now.astype(np.float64) - pulled.astype(np.float64)
        with np.errstate(all="ignore"):
            corrected: np.ndarray = np.where(back == 0, g, g + strength * back * g * g).astype(gradient.dtype)
        return corrected

    def _update(self, key: BlockKey, state: BlockState, turn: int, gradient: np.ndarray) -> Values:
        """The source's update of one parameter, whole; the key needs its own elements of the result."""
        piece, graph = self._piece(key), self._source
        name = self.training.gradients[piece.tensor]
        if key not in self._updates:
            names = [*state.block.states, *state.block.counters]
            wanted = dict.fromkeys(self._updated[self._pieces[key[0]][name].tensor] for name in names)
            self._updates[key] = Executor(subgraph(graph, graph.nodes, wanted, {name}), self._cache)
        program = self._updates[key]
        type = self.training.graph.types[name]
        whole = np.zeros(type.dims, numpy_dtype(type.dtype))
        put(whole, piece.place, gradient.astype(whole.dtype), piece.start)
        fed = {hyper.name: np.array(hyper.at(turn)) for hyper in self._hyper} | self._whole | {name: whole}
        return run_source(program, fed, self._reference.call)

    def _hold(
        self, variant: str, number: int, rank: int, name: str, kind: str,
        value: np.ndarray, wanted: np.ndarray, start: np.ndarray, floor: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        """Compare a value; ``floor``: a further allowance, requested for values too far off."""
        if not finite(wanted):
            self.result.doubt(name, f"{variant}, step {number + 1}: the source has a value that is not finite")
            return
        off, allowed = distance(value, wanted), allowance(wanted, start, self.result.tolerance)
        if not off <= allowed:
            allowed += floor()
        self._differs(variant, number, rank, name, kind, ratio(off, allowed))

    def _differs(self, variant: str, number: int, rank: int, name: str, kind: str, error: float) -> None:
        self.result.note(Difference(variant, number + 1, rank, name, kind, error))
