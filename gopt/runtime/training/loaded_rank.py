"""One rank of an output folder: its graphs and states, compared with the other ranks, and compiled for a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gopt.analysis.loss_reduction import LossReduction
from gopt.artifact.graph_check import check_rank
from gopt.artifact.manifest_entries import LocalState
from gopt.errors import RunError
from gopt.ir.graph import Graph
from gopt.ir.load import load
from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.device import Device
from gopt.runtime.engines.base import CollectiveRunner, Engine, raise_on_one_rank
from gopt.runtime.execution_plan import ExecutionPlan, plan_execution
from gopt.runtime.executor import Executor, HeldInput
from gopt.runtime.session import Array
from gopt.runtime.shared_memory import SharedMemory
from gopt.runtime.step_runs import step_runs
from gopt.runtime.training.activation_store import ActivationStore
from gopt.runtime.training.consistency import check_calls, share_memory
from gopt.runtime.training.folder_files import check_own, check_shared
from gopt.runtime.training.initial_states import initial_states
from gopt.runtime.training.job import read_manifest
from gopt.runtime.training.start_values import Replicas, check_equal, take_from_first
from gopt.runtime.training.startup import startup_values


class LoadedRank:
    """The rank of an engine. Raises InputError and RunError for unusable files."""

    def __init__(self, folder: Path, engine: Engine, device: Device) -> None:
        self.folder, self.engine, self.device = folder, engine, device
        self.manifest, self.mesh = read_manifest(folder)
        self.record = self.manifest.ranks[engine.rank]
        check_own(folder, self.manifest, engine.rank)
        self.phases: list[tuple[str, int]] = [*self.manifest.schedule.items()]
        self.micro_steps = max(times for _, times in self.phases)
        self.actions = step_runs(folder, self.manifest, self.mesh, engine.rank)
        """The runs of a step in order: a phase, and the number of its micro-step."""
        self.states: tuple[LocalState, ...] = self.manifest.states_of(self.record)
        self.graphs = {phase: self._load(phase) for phase, _ in self.phases}
        check_rank(self.manifest, self.record, self.graphs, folder)
        self._saved = ActivationStore(
            [value.name for value in self.record.saved], [graph.inputs for graph in self.graphs.values()]
        )
        self.weight = LossReduction.parse(self.manifest.loss_reduction).value
        """The value of a rank that its losses are weighed by, or ''."""
        for graph in self.graphs.values():
            if self.weight in graph.types and self.weight not in graph.inputs and self.manifest.loss in graph.outputs:
                graph.outputs[self.weight] = graph.types[self.weight]
        self.replicas = Replicas(self.manifest, self.mesh)
        self.held: dict[str, Any] = {}
        """State -> its value; once compiled, the device's."""
        self.programs: dict[str, Executor] = {}
        data = self.mesh.data_group
        self.part = self.mesh.index(data, engine.rank) if data is not None else 0
        self.parts = self.mesh.data_ranks

    def _load(self, phase: str) -> Graph:
        path = self.folder / Path(self.record.files[phase]).name
        if not path.is_file():
            raise RunError(f"there is no file {path}", "shard again, or copy it here")
        return load(path, own=True)

    def input_type(self, name: str) -> TensorType:
        """The type of a state or another input in the rank's files."""
        return next(graph.inputs[name] for graph in self.graphs.values() if name in graph.inputs)

    @property
    def zeros(self) -> dict[str, Array]:
        """The accumulators at the start of a step."""
        return {
            accumulator.input: np.zeros(accumulator.shape, numpy_dtype(accumulator.dtype))
            for accumulator in self.record.accumulators
        }

    def start_values(self, state: str | None, *, startup: bool) -> dict[str, Any]:
        """The states of a training that starts anew: of the start-up graph, if ``startup``, else of the folder, else of
        the file ``state``."""
        computed: Mapping[str, Array] = {}
        if startup and self.record.startup is not None:
            types = {state.input: self.input_type(state.input) for state in self.states}
            computed = startup_values(self.folder / self.record.startup, types)
        return self.zeros | initial_states(self.states, self.graphs, state, computed)

    def prepare(self, sync: Sequence[str] = ()) -> None:
        """Check with all ranks, then allocate memory, then compile; every rank calls it. ``sync``: axes along which
        the first rank gives the states in common. Raises RunError, UnsupportedError."""
        raise_on_one_rank(self.engine, lambda: check_shared(self.folder, self.manifest, self.engine))
        check_calls(self.engine, self.mesh, self.graphs)
        if sync:
            types = {state.input: self.input_type(state.input) for state in self.states}
            take_from_first(self.engine, self.replicas, sync, self.device, self.held, types)
        check_equal(self.engine, self.replicas, self.held)
        plans = raise_on_one_rank(self.engine, self._plan)
        shared = share_memory(self.engine, list(plans.values()))
        raise_on_one_rank(self.engine, lambda: self._compile(plans, shared))

    def _plan(self) -> dict[str, ExecutionPlan]:
        def member(group: str) -> int:
            return self.mesh.index(group, self.engine.rank)

        following, graphs = self.manifest.next_inputs(self.record), self.graphs.items()
        host = self.manifest.host
        return {phase: plan_execution(graph, following, self.device, member, host) for phase, graph in graphs}

    def _compile(self, plans: Mapping[str, ExecutionPlan], shared: Sequence[SharedMemory]) -> None:
        cache = self.device.sessions()
        self.programs = {phase: Executor(plan, cache, memory) for (phase, plan), memory in zip(plans.items(), shared)}
        for program in self.programs.values():
            program.bind_states(self.held)

    def hold(self) -> None:
        """Move the states to the device, behind ``prepare``."""
        self.put(self.held)

    def put(self, arrays: Mapping[str, Any]) -> None:
        """Take values of states, each into the memory in which the steps keep the state."""
        hosted = set(self.manifest.host.states) if self.device.has_host else set()
        for name, array in arrays.items():
            self.held[name] = self.device.hold_on_host(array) if name in hosted else self.device.hold(array)

    def run_phase(self, phase: str, turn: int, feeds: Mapping[str, Any], calls: CollectiveRunner) -> dict[str, Any]:
        """Run a phase of a micro-step on the states and these inputs; returns the other outputs, as views."""
        saved = self._saved.take(turn, self.graphs[phase].inputs)
        moved = set(self.manifest.host.activations) if self.device.has_host else set()
        restored = {
            name: HeldInput(value if name in moved else self.device.to_device(value)) for name, value in saved.items()
        }
        results = self.programs[phase].advance(
            self.held, dict[str, Any](feeds) | restored if restored else feeds, calls
        )
        self._saved.keep(turn, results)
        return results

    def to_host(self, value: Any) -> Array:
        """A state as an array in host memory, after all pending work on this state."""
        return self.device.to_host(self.device.view(value))
