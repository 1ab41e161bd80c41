"""Asynchronous runs on threads whose roles can be looked at, and a serial interpreter of recorded orders."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from async_steps import scheduled
from helpers import run_graph

from gopt import api
from gopt.analysis.training import TrainingGraph
from gopt.artifact.manifest_entries import InputKind
from gopt.artifact.pieces import cut
from gopt.artifact.server_entries import KeyEntry, Mode, TableEntry
from gopt.artifact.table_parts import table_layout
from gopt.ir.graph import Graph
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.order import Arrival, Order
from gopt.runtime.messages.roster import Settings
from gopt.runtime.messages.threads import ThreadHub, run_threads
from gopt.runtime.parameter_server.async_server import AsyncServer
from gopt.runtime.parameter_server.async_trainer import AsyncTrainer
from gopt.runtime.parameter_server.faults import FaultOptions
from gopt.runtime.parameter_server.job import ServerJob
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.training.array_source import MicroStep, SampleOrder
from gopt.runtime.training.data import BatchSource, open_data
from gopt.runtime.training.job import Job


@dataclass
class Run:
    """What was left of a run. ``losses``: of the chief."""

    job: ServerJob
    trainers: dict[int, AsyncTrainer] = field(default_factory=dict)
    servers: dict[int, AsyncServer] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    arrivals: dict[int, list[Arrival]] = field(default_factory=dict)

    def states(self) -> dict[str, bytes]:
        """All states of all servers."""
        return {
            f"{number} {name}": np.asarray(value).tobytes()
            for number, server in sorted(self.servers.items()) for name, value in server.states().items()
        }  # fmt: skip

    def local(self, trainer: int, name: str) -> Array:
        """A state as a trainer has it."""
        device = self.trainers[trainer]._device
        return np.asarray(device.to_host(device.view(self.trainers[trainer].held[name])))

    def parameter(self, name: str) -> Array:
        """A parameter, put together from all servers."""
        parts = []
        for server in self.servers.values():
            values = server.states()
            for key in server.keys.values():
                (piece,) = key.block.entry.pieces
                if piece.tensor == name:
                    parts.append((piece.start, values[key.block.entry.inputs[0]].reshape(-1)))
        return np.concatenate([value for _, value in sorted(parts, key=lambda part: part[0])])


def buckets(server: AsyncServer) -> set[int]:
    """The buckets of which a server has keys: it gets one push of each trainer and round for each of them."""
    return {server.server_job.plan.keys[number].bucket for number in server.keys}


def folder(tmp_path: Path, **given: object) -> Path:
    """A split of a step with a schedule."""
    options = {"trainers": 2, "servers": 2, "minimum": 4, "mode": Mode.ASYNC, **given}
    target = tmp_path / f"split{len(list(tmp_path.iterdir()))}"
    api.split(api.load(scheduled(tmp_path / "step.onnx")), SplitOptions(**options)).write(target)  # type: ignore[arg-type]
    return target


def unequal(part: int, parts: int) -> Iterator[dict[str, Array]]:
    """Batches of four rows: five for the first trainer, two for each other."""
    return _batches(part, 2 if part else 5)


def unequal_for_the_chief(part: int, parts: int) -> Iterator[dict[str, Array]]:
    """Batches of four rows: two for the first trainer, five for each other."""
    return _batches(part, 5 if part else 2)


def _batches(part: int, count: int) -> Iterator[dict[str, Array]]:
    random = np.random.default_rng(part)
    for _ in range(count):
        yield {"x": random.normal(size=(4, 3)).astype("f4"), "y": random.normal(size=(4, 2)).astype("f4")}


class FailingTrainer(AsyncTrainer):
    """Dies in the middle of its second step."""

    def _end_round(self, round_number: int) -> None:
        if round_number == 1:
            raise RuntimeError("out of power")
        super()._end_round(round_number)


def run_split(
    folder: Path, data: str, steps: int, *, order: Order | None = None, bound: int | None = None,
    failing: int | None = None, settings: Mapping[str, str] | None = None, trainers: int | None = None,
    faults: FaultOptions | None = None, **given: object,
) -> Run:  # fmt: skip
    job = Job(folder=folder, data=data, steps=steps, settings=dict(settings or {}), **given)  # type: ignore[arg-type]
    found = Run(replace(ServerJob.read(job, trainers), faults=faults or FaultOptions()))
    hub = ThreadHub(found.job.roster(), Settings(deadline=60), order)

    def work(endpoint: Endpoint) -> None:
        number = endpoint.number
        if number < found.job.trainers:
            make = FailingTrainer if number == failing else AsyncTrainer
            trainer = found.trainers[number] = make(found.job, endpoint, lambda *_: None)
            trainer.run(lambda progress: found.losses.append(progress.losses[0]))
        else:
            server = AsyncServer(found.job, endpoint, lambda *_: None, bound=bound)
            found.servers[number - found.job.trainers] = server
            server.run()
        found.arrivals[number] = endpoint.arrivals

    run_threads(hub, work, lambda number: number == failing)
    return found


class SourceGradients:
    """The gradients of a source, by parameter, for a batch and some parameters."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training, graph = training, training.graph
        producers, kept = graph.producers(), set[int]()
        stack = list(training.gradients.values())
        while stack:
            node = producers.get(stack.pop())
            if node is not None and id(node) not in kept:
                kept.add(id(node))
                stack += node.reads
        nodes = [node for node in graph.nodes if id(node) in kept]
        inputs = {name: graph.types[name] for name in (*training.gradients, *training.batch)}
        outputs = {name: graph.types[name] for name in training.gradients.values()}
        constants = {name: tensor for name, tensor in graph.initializers.items() if name not in inputs}
        self.graph = Graph("gradients", nodes, inputs, outputs, constants, graph.types, graph.header)
        self.cache = SessionCache()

    def __call__(self, parameters: Mapping[str, Array], batch: Mapping[str, Array]) -> dict[str, Array]:
        made = run_graph(self.graph, {**parameters, **batch}, self.cache)
        return {name: made[value] for name, value in self.training.gradients.items()}


Slot = int | tuple[int, int]
"""A key, or a table and the server of one of its parts."""


def interpret(
    run: Run, training: TrainingGraph, update: object, data: str, hyper: Mapping[str, Array] | None = None,
    touched: Callable[[Mapping[str, Array]], Mapping[str, Array]] = lambda batch: {},
    before: Mapping[Slot, Mapping[str, Array]] | None = None, ahead: int = 0,
) -> dict[Slot, dict[str, Array]]:  # fmt: skip
    """Key -> the source's states as they are for it, after what each server received in order. One thing at a time,
    whole tensors, the source's own operators; a push of a key takes what its own piece needs of the result.

    ``touched``: the rows of tables that a batch looks up, where updates run on these alone. ``before``: what an earlier
    run left, from which this one goes on; ``ahead``: by how many batches its data is then ahead."""
    plan, trainers = run.job.plan, run.job.trainers
    assert plan.mode is Mode.ASYNC and callable(update)
    keys: dict[int, list[tuple[int, KeyEntry]]] = {}
    for number, key in enumerate(plan.keys):
        keys.setdefault(key.bucket, []).append((number, key))
    start = update.start()  # type: ignore[attr-defined]
    parts = [(table, server) for table, entry in enumerate(plan.tables) for server in entry.servers]
    held: dict[Slot, dict[str, Array]] = {number: dict(start) for number in (*range(len(plan.keys)), *parts)}
    held |= {number: dict(states) for number, states in (before or {}).items()}
    counters = {state.tensor for state in training.states if state.tensor == "step"}
    accepted = dict.fromkeys(held, 0)
    gradients, source = SourceGradients(training), _data(run, data)
    known: dict[int, dict[str, Array]] = {
        trainer: {entry.parameter: np.array(start[entry.parameter]) for entry in plan.tables}
        for trainer in range(trainers)
    }  # fmt: skip
    came: dict[tuple[int, int], int] = {}
    made: dict[tuple[int, int], dict[str, Array]] = {}
    pulls, pushes = (Kind.PULL, Kind.PULL_ROWS), (Kind.PUSH, Kind.PUSH_ROWS)
    events = {
        server: deque(each for each in run.arrivals[trainers + server] if each.kind in (*pulls, *pushes))
        for server in range(plan.servers)
    }
    due = Counter((each.source, each.round) for queue in events.values() for each in queue if each.kind in pulls)
    while any(events.values()):
        for server, queue in events.items():
            while queue:
                event = queue[0]
                slot = event.source, event.round
                if event.kind not in pulls and came.get(slot) != due[slot]:
                    break
                queue.popleft()
                if event.kind in pulls:
                    for number, key in keys[event.key] if event.kind is Kind.PULL else ():
                        _take(known[event.source], key, held[number], start)
                    if event.kind is Kind.PULL_ROWS:
                        _take_rows(known[event.source], plan.tables[event.key], server, held[event.key, server])
                    came[slot] = came.get(slot, 0) + 1
                    continue
                if slot not in made:
                    made[slot] = gradients(
                        known[event.source], source.batch(MicroStep(event.round, event.source, trainers, ahead))
                    )
                rows = event.kind is Kind.PUSH_ROWS
                for number in [(event.key, server)] if rows else [number for number, _ in keys[event.key]]:
                    now = update(held[number], made[slot], hyper)
                    accepted[number] += 1
                    if accepted[number] % trainers:
                        now |= {name: held[number][name] for name in counters}
                    if rows and plan.tables[event.key].update == "lazy":
                        batch = source.batch(MicroStep(event.round, event.source, trainers))
                        _keep_rows(plan.tables[event.key].parameter, touched(batch), held[number], now)
                    held[number] = now
    return held


def _keep_rows(table: str, touched: Mapping[str, Array], before: Mapping[str, Array], now: dict[str, Array]) -> None:
    """Rows of a table that nobody touched are what they were, with all that the optimizer keeps for them."""
    for name in [name for name in now if name == table or name.startswith(f"{table}.")]:
        kept = np.array(before[name])
        kept[touched[table]] = now[name][touched[table]]
        now[name] = kept


def _take_rows(known: dict[str, Array], entry: TableEntry, server: int, states: Mapping[str, Array]) -> None:
    """A part of a table, all of it: what is not looked up has no effect."""
    layout = table_layout(entry)
    rows, columns = layout.row_ids(server), layout.columns(server)
    place = slice(rows.start, rows.stop, rows.step), slice(columns.start, columns.stop)
    known[entry.parameter] = whole = known[entry.parameter].copy()
    whole[place] = states[entry.parameter][place]


def table_pieces(run: Run, held: Mapping[Slot, Mapping[str, Array]]) -> Sequence[tuple[str, bytes, bytes]]:
    """Of each part of a table and its states the name, what the server has, and what an interpreter has."""
    found = []
    for server in run.servers.values():
        tensors = {each.input: each.pieces[0] for each in server.entry.state if each.pieces}
        for number, table in server.tables.items():
            for name, value in table.states.items():
                piece = tensors[name]
                wanted = cut(piece, held[number, server.number][piece.tensor])
                found.append((f"{piece.tensor} of server {server.number}", value.tobytes(), wanted.tobytes()))
    return found


def _take(known: dict[str, Array], key: KeyEntry, states: Mapping[str, Array], start: Mapping[str, Array]) -> None:
    (piece,) = key.pieces
    whole = known.setdefault(piece.tensor, np.array(start[piece.tensor]))
    known[piece.tensor] = whole = whole.copy()
    whole.reshape(-1)[piece.start : piece.stop] = states[piece.tensor].reshape(-1)[piece.start : piece.stop]


def _data(run: Run, data: str) -> BatchSource:
    inputs = run.job.manifest.inputs_of(InputKind.BATCH)
    return open_data(data, {each.name: each.type for each in inputs}, SampleOrder(run.job.job.shuffle))


def pieces(run: Run, held: Mapping[Slot, Mapping[str, Array]]) -> Sequence[tuple[str, bytes, bytes]]:
    """Of each key its name, its parameter on the server, and what an interpreter has of it."""
    found = []
    for server in run.servers.values():
        for number, key in server.keys.items():
            (piece,) = key.block.entry.pieces
            wanted = held[number][piece.tensor].reshape(-1)[piece.start : piece.stop]
            found.append((key.block.entry.name, key.value.tobytes(), wanted.tobytes()))
    return found


def interpret_geo(
    run: Run, training: TrainingGraph, update: object, data: str
) -> tuple[dict[str, Array], dict[int, dict[str, Array]]]:
    """Parameters of the servers and states of the trainers after a run in mode geo, in the order in which servers
    received: one thing at a time, by NumPy and the source's own operators."""
    plan, trainers = run.job.plan, run.job.trainers
    keys: dict[int, list[KeyEntry]] = {}
    for key in plan.keys:
        keys.setdefault(key.bucket, []).append(key)
    start = update.start()  # type: ignore[attr-defined]
    served = {name: np.array(start[name]) for name in training.gradients}
    local = {trainer: dict(start) for trainer in range(trainers)}
    last = {trainer: {name: start[name] for name in served} for trainer in range(trainers)}
    pulled = {trainer: {name: np.array(start[name]) for name in served} for trainer in range(trainers)}
    deltas: dict[tuple[int, int], dict[str, Array]] = {}
    came: dict[tuple[int, int], int] = {}
    gradients, source = SourceGradients(training), _data(run, data)

    def begin(trainer: int, round_number: int) -> None:
        for turn in range(plan.every):
            batch = source.batch(MicroStep(round_number * plan.every + turn, trainer, trainers))
            own = {name: local[trainer][name] for name in served}
            local[trainer] = update(local[trainer], gradients(own, batch))  # type: ignore[operator]
        deltas[trainer, round_number] = {
            name: (local[trainer][name] - last[trainer][name]) / np.float32(trainers) for name in served
        }

    def end(trainer: int, round_number: int) -> None:
        for name, delta in deltas[trainer, round_number].items():
            now = pulled[trainer][name].copy()
            behind = (last[trainer][name] + delta) - now
            local[trainer][name] = local[trainer][name] - behind
            last[trainer][name] = now

    events = {
        server: deque(each for each in run.arrivals[trainers + server] if each.kind in (Kind.PULL, Kind.PUSH))
        for server in range(plan.servers)
    }
    while any(events.values()):
        for queue in events.values():
            while queue:
                event = queue[0]
                if event.kind is Kind.PUSH and event.round and came.get((event.source, event.round)) != len(keys):
                    break
                queue.popleft()
                if event.kind is Kind.PUSH and (event.source, event.round) not in deltas:
                    begin(event.source, event.round)
                for key in keys[event.key]:
                    (piece,) = key.pieces
                    place = slice(piece.start, piece.stop)
                    if event.kind is Kind.PULL:
                        pulled[event.source][piece.tensor].reshape(-1)[place] = served[piece.tensor].reshape(-1)[place]
                    else:
                        delta = deltas[event.source, event.round][piece.tensor].reshape(-1)[place]
                        served[piece.tensor].reshape(-1)[place] += delta
                if event.kind is Kind.PULL:
                    slot = event.source, event.round
                    came[slot] = came.get(slot, 0) + 1
                    if came[slot] == len(keys):
                        end(event.source, event.round - 1)
    return served, local
