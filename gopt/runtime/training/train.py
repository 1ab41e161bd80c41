"""Train: one rank's life, whatever the engine. Agree with the others, run step after step, keep what was learned."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gopt.artifact import manifest_check
from gopt.artifact.manifest import InputKind, LocalState, Manifest
from gopt.artifact.path_diagnostics import check_folder
from gopt.collectives.node import format_shape
from gopt.errors import GoptError, InputError, OptionError, RunError
from gopt.ir.external_data import load_state
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.load import load
from gopt.ir.types import TensorType, numpy_dtype
from gopt.mesh import Mesh
from gopt.runtime.allocator import SharedBuffer
from gopt.runtime.device import HOST, Device
from gopt.runtime.engines.base import AsyncCollectives, CollectiveRunner, Engine
from gopt.runtime.executor import Executor, no_timing
from gopt.runtime.session import Array
from gopt.runtime.training.checkpoint import Checkpoints
from gopt.runtime.training.data import BatchSource, MicroStep, open_data, parse_schedule
from gopt.runtime.training.trace import Trace, check_writable

StatesFile = dict[str, Array]
"""Arrays; once steps run, what the device shows for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a run is to do; the same on all ranks."""

    folder: Path
    data: str
    steps: int
    settings: Mapping[str, str] = field(default_factory=dict)
    """Hyper-parameter -> a number or a schedule."""
    state: str | None = None
    shuffle: int | None = None
    checkpoint: Path | None = None
    every: int = 0
    """Steps between checkpoints; 0 is one at the end."""
    keep: int = 2
    resume: bool = False
    stop_on_nan: bool = False
    sync_init: bool = False
    trace: Path | None = None
    """Where the first rank writes what all ranks did when, in Chrome's trace format."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One step as the first rank tells it: losses of all ranks (means of micro-steps), seconds, samples of all."""

    step: int
    losses: tuple[float, ...]
    seconds: float
    samples: int

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    def to_json(self) -> dict[str, Any]:
        rate = self.samples / self.seconds if self.seconds else 0.0
        return {"step": self.step, "loss": self.loss, "losses": list(self.losses), "seconds": round(self.seconds, 6),
                "samples_per_second": round(rate, 3)}  # fmt: skip


def read_manifest(folder: Path) -> tuple[Manifest, Mesh]:
    """The manifest of an output folder, and its mesh; raises InputError."""
    check_folder(folder)
    manifest, mesh = manifest_check.read_manifest(folder)
    if len(manifest.ranks) != mesh.ranks:
        raise RunError(f"{folder} holds {len(manifest.ranks)} of {mesh.ranks} ranks", "shard without --only-ranks")
    return manifest, mesh


class Trainer:
    """One rank of a job."""

    def __init__(
        self, job: Job, engine: Engine, position: Callable[[int, int], None], device: Device = HOST,
        calls: type[CollectiveRunner] = AsyncCollectives, *, stop_signal: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self.job, self.engine, self.device, self._calls = job, engine, device, calls
        self.manifest, self.mesh = read_manifest(job.folder)
        self.record = self.manifest.ranks[engine.rank]
        self.phases: list[tuple[str, int]] = [*self.manifest.schedule.items()]
        self.states: tuple[LocalState, ...] = self.manifest.states_of(self.record)
        self.step = 0
        self.stopped = 0
        """The signal for which the run ends early, the same on all ranks: ``asked`` says what came to this one."""
        self._stop_signal = stop_signal
        self.call = -1
        self._position = position
        self._graphs = {phase: self._load(phase) for phase, _ in self.phases}
        manifest_check.check_rank(self.manifest, self.record, self._graphs, job.folder)
        self.schedules = self._settings()
        self.types = self._batch_types()
        self.data: BatchSource = open_data(job.data, self.types, job.shuffle)
        self.checkpoints = Checkpoints(job.checkpoint, job.folder, self.manifest, job.keep) if job.checkpoint else None
        if self.checkpoints is not None:
            self.checkpoints.check(job.resume)
        self.held = self._start()
        cache = device.sessions()
        self._next_input = replaces = self.manifest.next_inputs(self.record)
        self.programs = {phase: Executor(graph, cache, replaces, device) for phase, graph in self._graphs.items()}
        for program in self.programs.values():
            program.bind_states(self.held)
        data = self.mesh.data_group
        self.part = self.mesh.index(data, engine.rank) if data is not None else 0
        self.parts = self.mesh.data_ranks

    def _load(self, phase: str) -> Graph:
        path = self.job.folder / Path(self.record.files[phase]).name
        if not path.is_file():
            raise RunError(f"there is no file {path}", "shard again, or copy it here")
        return load(path, own=True)

    def _input(self, name: str) -> TensorType:
        return next(graph.inputs[name] for graph in self._graphs.values() if name in graph.inputs)

    def _settings(self) -> dict[str, Callable[[int], float]]:
        hyper = [each.name for each in self.manifest.inputs_of(InputKind.HYPER)]
        unknown = sorted(set(self.job.settings) - set(hyper))
        if unknown:
            hint = f"the step has {', '.join(hyper)}" if hyper else "the step has none"
            raise OptionError(f"--set: {unknown[0]!r} is no hyper-parameter of the step", hint)
        missing = [name for name in hyper if name not in self.job.settings]
        if missing:
            raise OptionError(f"the step needs a value for {missing[0]!r}", f"give --set {missing[0]}=1e-3")
        return {name: parse_schedule(text) for name, text in self.job.settings.items()}

    def _batch_types(self) -> dict[str, TensorType]:
        inputs = self.manifest.inputs_of(InputKind.BATCH)
        for each in inputs:
            if not each.type.static:
                raise InputError(f"batch input {each.name!r} has the open shape {each.type}")
        return {each.name: each.type for each in inputs}

    def _start(self) -> StatesFile:
        """The states at the first step: of the checkpoint, else the stored ones, else of ``--state``."""
        held = {each.input: np.zeros(each.shape, numpy_dtype(each.dtype)) for each in self.record.accumulators}
        if self.job.resume:
            if self.checkpoints is None:
                raise OptionError("--resume needs --checkpoint DIR")
            if found := self.checkpoints.steps():
                self.step = found[-1]
                return held | self.checkpoints.load(self.engine.rank, self.step)
        stored = {
            name: tensor for graph in self._graphs.values() for name, tensor in graph.initializers.items()
            if name in graph.inputs
        }  # fmt: skip
        given = load_state(self.job.state) if self.job.state is not None else {}
        for state in self.states:
            name, type = state.input, self._input(state.input)
            if name in stored:
                held[name] = np.array(stored[name].numpy())
                continue
            parts = [given.get(piece.tensor) for piece in state.pieces]
            if any(part is None for part in parts):
                missing = next(p.tensor for p, part in zip(state.pieces, parts) if part is None)
                raise InputError(f"state {missing!r} has no value", "give the values with --state FILE")
            flats = [
                np.asarray(part.numpy()).reshape(-1)[piece.start : piece.stop]
                for part, piece in zip(parts, state.pieces) if part is not None
            ]  # fmt: skip
            flat = np.concatenate(flats) if flats else np.zeros(0)
            held[name] = flat.astype(numpy_dtype(type.dtype)).reshape(type.dims)
        return held

    # --- before the first step ---

    def check_consistency(self) -> None:
        """Compare with all ranks what must be equal before anything hangs or drifts apart; raises RunError."""
        plan: dict[str, list[str]] = {}
        for phase, graph in self._graphs.items():
            for node in graph.nodes:
                if node.domain == COMM:
                    plan.setdefault(str(node.attributes["group"]), []).append(f"{phase}: {_call_text(node, graph)}")
        everything = self.engine.gather((str(self.mesh), {group: _digest(calls) for group, calls in plan.items()}))
        meshes = [mesh for mesh, _ in everything]
        if len(set(meshes)) > 1:
            raise RunError(f"ranks run different meshes: {' and '.join(sorted(set(meshes)))}")
        groups = sorted({group for _, digests in everything for group in digests})
        self.engine.prepare(groups)
        differs = any(
            digests.get(group) != everything[self.mesh.members(group, rank)[0]][1].get(group)
            for rank, (_, digests) in enumerate(everything) for group in groups
        )  # fmt: skip
        if differs:
            self._raise_plan_difference(self.engine.gather(plan), groups)
        if self.job.sync_init:
            self._broadcast_states()
        self._compare_states()
        self._map_buffers()

    def _raise_plan_difference(self, plans: list[dict[str, list[str]]], groups: list[str]) -> None:
        for group in groups:
            for rank, plan in enumerate(plans):
                first = self.mesh.members(group, rank)[0]
                mine, theirs = plan.get(group, []), plans[first].get(group, [])
                for place in range(max(len(mine), len(theirs))):
                    here = mine[place] if place < len(mine) else "no more calls"
                    there = theirs[place] if place < len(theirs) else "no more calls"
                    if here != there:
                        raise RunError(
                            f"ranks {first} and {rank} differ at call {place} over {group}: {there}; {here}",
                            "all ranks need the files of one gopt shard",
                        )

    def _map_buffers(self) -> None:
        """Let the engine make calls in the memory that it lent for them, by group and number among the calls of the
        group: the same on all members."""
        engine_buffers: dict[tuple[str, int], Array] = {}
        common: dict[tuple[str, int], SharedBuffer] = {}
        seen: Counter[str] = Counter()
        for program in self.programs.values():
            program.bind_states(self.held)  # those of the first rank
            for number, node in enumerate(node for node in program.graph.nodes if node.domain == COMM):
                group = str(node.attributes["group"])
                if number in program.engine_buffers:
                    engine_buffers[group, seen[group]] = program.engine_buffers[number]
                if number in program.common:
                    common[group, seen[group]] = program.common[number]
                seen[group] += 1
        self.engine.map_buffers(engine_buffers, common)

    def _replicated_states(self) -> list[str]:
        return [state.input for state in self.manifest.common.state if not state.local]

    def _broadcast_states(self) -> None:
        """Replicated states as the first rank has them."""
        group = "+".join(name for name, _ in self.mesh.axes)
        self.engine.prepare([group])
        for place, name in enumerate(self._replicated_states()):
            array = self.held[name]
            attributes = {
                "group": group, "root": 0, "dtype": self._input(name).dtype, "shapes": [format_shape(array.shape)],
            }  # fmt: skip
            node = Node("Broadcast", [name], [name], domain=COMM, attributes=attributes)
            given = [self.device.view(self.device.to_device(array))] if self.engine.rank == 0 else []
            self.held[name] = self.device.to_host(self.engine.call(place, node, given)[0])

    def _compare_states(self) -> None:
        mine = {name: hashlib.sha256(np.ascontiguousarray(self.held[name]).tobytes()).hexdigest()
                for name in self._replicated_states()}  # fmt: skip
        for rank, other in enumerate(self.engine.gather(mine)):
            for name, seen in mine.items():
                if other.get(name) != seen:
                    raise RunError(
                        f"rank {self.engine.rank} and rank {rank} start with different values of {name}",
                        "give all the same files, or take the first rank's with --sync-init",
                    )

    # --- the loop ---

    def run(self, on_step: Callable[[Progress], None], on_start: Callable[[], None] = lambda: None) -> None:
        """All steps of the job, or those until a signal comes; ``tell`` hears of each, on the first rank, and ``begun``
        is called there once nothing stands in the way of the first."""
        try:
            self.check_consistency()
            with nullcontext() if self.checkpoints is None else self.checkpoints.open(self.engine, self.step):
                if self.engine.rank == 0:
                    on_start()
                self._train(on_step)
        except GoptError as error:
            raise self._with_position(error) from error
        except (Exception, SystemExit) as error:  # what the user's functions raise, sys.exit among it
            raise self._with_position(RunError(f"{type(error).__name__}: {error}")) from error

    def _train(self, on_step: Callable[[Progress], None]) -> None:
        trace = Trace(self.engine.rank) if self.job.trace is not None else None
        if self.job.trace is not None and self.engine.rank == 0:
            check_writable(self.job.trace)
        collectives = self._calls(self.engine, self._set_position, trace.call if trace is not None else no_timing)
        self.held = {name: self.device.view(self.device.to_device(array)) for name, array in self.held.items()}
        for program in self.programs.values():
            program.mark = trace.segment if trace is not None else no_timing
        try:
            while self.step < self.job.steps and not self.stopped:
                self._step(collectives, on_step)
        finally:
            collectives.close()
        if trace is not None and self.job.trace is not None:
            trace.write(self.engine, self.job.trace)

    def _with_position(self, error: GoptError) -> GoptError:
        if getattr(error, "named", False):
            return error
        where = f"rank {self.engine.rank}, step {self.step + 1}"
        where += f", call {self.call}" if self.call >= 0 else ""
        named = type(error)(f"{where}: {error.message}", *error.hints)
        named.named = True  # type: ignore[attr-defined]
        return named

    def _set_position(self, call: int) -> None:
        self.call = call
        self._position(self.step, call)

    def _step(self, collectives: CollectiveRunner, on_step: Callable[[Progress], None]) -> None:
        begin = time.perf_counter()
        self._set_position(-1)
        hyper = self._hyper()
        seen: list[float] = []
        times = max(times for _, times in self.phases)
        for phase, count in self.phases:
            program = self.programs[phase]
            for turn in range(count):
                values = {**self.held, **hyper}
                inputs = program.graph.inputs
                if not inputs.keys().isdisjoint(self.types):
                    values |= self.data.batch(MicroStep(self.step * times + turn, self.part, self.parts))
                outputs = program.run({name: values[name] for name in inputs if name in values}, collectives)
                self.held.update(
                    (self._next_input[name], made) for name, made in outputs.items() if name in self._next_input
                )
                if self.manifest.loss in outputs:
                    seen.append(float(self.device.to_host(outputs[self.manifest.loss])))
        loss = sum(seen) / len(seen) if seen else math.nan
        if self.job.stop_on_nan and not math.isfinite(loss):
            self.call = -1  # it came of no call
            raise RunError(f"the loss is {loss}", "lower the learning rate, or leave --stop-on-nan out")
        self.step += 1
        losses, signals = zip(*self.engine.gather((loss, self._stop_signal())), strict=True)
        self.stopped = next(filter(None, signals), 0)
        if self.engine.rank == 0:
            size = max((type.dims[0] if type.dims else 1 for type in self.types.values()), default=1)
            on_step(Progress(self.step, losses, time.perf_counter() - begin, size * self.parts * times))
        if self.checkpoints is not None and self._due():
            self.checkpoints.save(self.engine, self.step, self.held, self.device.to_host)

    def _due(self) -> bool:
        return (
            self.step == self.job.steps
            or bool(self.stopped)
            or bool(self.job.every and self.step % self.job.every == 0)
        )

    def _hyper(self) -> StatesFile:
        made = {}
        for each in self.manifest.inputs_of(InputKind.HYPER):
            value = self.schedules[each.name](self.step)
            made[each.name] = np.full(each.type.dims, value, numpy_dtype(each.dtype))
        return made


def _call_text(node: Node, graph: Graph) -> str:
    """A call as all members of its group must have it."""
    kept = {key: value for key, value in sorted(node.attributes.items()) if key not in ("group", "peer")}
    types = [str(graph.types[name]) for name in node.outputs if name in graph.types and graph.types[name].static]
    shown = "" if "cuts" in kept and node.op_type == "ReduceScatter" else " " + ", ".join(types)
    return f"{node.op_type} {json.dumps(kept)}{shown}"


def _digest(calls: list[str]) -> str:
    return hashlib.sha256("\n".join(calls).encode()).hexdigest()
