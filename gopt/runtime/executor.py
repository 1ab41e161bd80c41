"""Runs a planned graph: allocates memory, compiles sessions, and runs step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from gopt.errors import RunError
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType, known
from gopt.runtime.bound_calls import BoundCall, CollectiveCallback, PendingCall
from gopt.runtime.device import HOST, CompiledSegment
from gopt.runtime.execution_plan import ExecutionPlan, FinalPlan, plan_execution
from gopt.runtime.host_value import array_dtype
from gopt.runtime.memory import aligned, is_aligned
from gopt.runtime.partition import CallStep, CopyStep, Segment, last_uses
from gopt.runtime.planner.memory_planner import plan_memory
from gopt.runtime.session import Array, SessionCache
from gopt.runtime.shared_memory import NOT_SHARED, SharedMemory

TimingCallback: TypeAlias = Callable[[str, float, float], None]
EarlyResults: TypeAlias = dict[int, dict[str, Any]]
"""Number of a segment that no call stands before -> its results that are read behind such segments."""


def no_timing(name: str, begin: float, end: float) -> None:
    """A TimingCallback that does nothing."""


def no_calls(*_: Any) -> Any:
    """The collectives of a graph that should have none; raises RunError."""
    raise RunError("a collective is in a graph that one rank runs alone", "give the model of one whole computation")


@dataclass(frozen=True, slots=True)
class HeldInput:
    """An input, checked and put on the device once for many runs of one Executor."""

    value: Any


class Executor:
    """A rank's graph, or a graph without collectives, compiled for a device.

    ``graph``: a plan, or a graph to plan here, left unchanged. ``shared``: the plan's granted shared memory, by numbers
    of calls in the file. Raises UnsupportedError for a type that is needed and unknown, NoKernelError for a missing
    kernel, RunError for a segment rejected by ONNX Runtime."""

    def __init__(self, graph: Graph | ExecutionPlan, cache: SessionCache, shared: SharedMemory = NOT_SHARED) -> None:
        plan = graph if isinstance(graph, ExecutionPlan) else plan_execution(graph, device=cache.device or HOST)
        final = plan.resolve(shared)
        self.graph = graph = plan.graph
        self._device = plan.device
        self.plans_memory = plan.plans_memory
        """Whether results keep their memory over steps, and states are updated in place."""
        self._assignment = final.assignment
        self._buffers = self._device.allocate_buffers(final.assignment, shared)
        self._inputs = graph.inputs
        self._hosted = plan.hosted
        self._initial = {name: graph.initializers[name] for name in graph.inputs if name in graph.initializers}
        self._outputs = tuple(graph.outputs)
        self._recent_feeds: dict[str, list[tuple[Any, Any]]] = {}
        """The last two arrays fed for an input, with their values: states mostly come back as one of two arrays."""
        views = {name: self._device.to_device(view) for name, view in self._buffers.views.items()}
        self._state_views = {name: views[name] for name in self._buffers.states}
        for value in views.values() if self.plans_memory else ():
            value.persistent = True
        self._last_uses = last_uses(plan.steps, self._outputs)
        self._waits = final.waits
        self._fixed: dict[str, Any] = {}
        """Values that are the same in every step."""
        self._steps = self._compile(plan, final, cache, views)
        constants = self._constants_outside(graph)
        self._fixed |= constants | {name: value for name, value in views.items() if name not in self._state_views}
        self._next = {name: plan.replaces[name] for name in self._outputs if name in plan.replaces}
        """Outputs that become states -> those states; ``_moved``: without those that are computed in the state's
        memory; ``_shown``: the other outputs."""
        overwritten = {item for part in final.aliases.values() for item in part.items()}
        self._moved = {name: state for name, state in self._next.items() if (name, state) not in overwritten}
        self._in_place = frozenset(self._next[name] for name in self._next.keys() - self._moved.keys())
        self._forwarded = self._forwarded_outputs(plan.replaces)
        self._advanced: dict[str, Any] | None = None
        """The states of the last step: those in ``_in_place`` stay the same values."""
        self._shown = [name for name in self._outputs if name not in plan.replaces]
        self.mark: TimingCallback = no_timing
        """Called after every segment with its name, and when it began and ended."""

    def _compile(
        self, plan: ExecutionPlan, final: FinalPlan, cache: SessionCache, buffered: Mapping[str, Any]
    ) -> list[BoundCall | CompiledSegment]:
        """Compile the steps with sessions and memory; ``buffered``: values in buffers of gathers."""
        graph = final.assignment.graph
        views, gathers = self._result_views(plan, final)
        computed = {name for step in plan.steps if isinstance(step, Segment) for name in step.outputs}
        results: dict[str, Any] = {
            name: turns[0] for name, turns in (views or {}).items() if name in computed and len(turns) == 1
        }
        persistent = {**results, **buffered}
        self._fixed = results
        gathered = {name: buffered[name] for name in self._buffers.gathered_views}
        gathered |= {
            name: views[name][0] for step in plan.steps if isinstance(step, CallStep) and step.index in gathers
            for name in step.outputs if views is not None
        }  # fmt: skip
        # Calls leave results undefined off their root.
        may_lack = {name for step in plan.steps if isinstance(step, CallStep) for name in step.outputs}
        compiled: list[BoundCall | CompiledSegment] = []
        for number, part in enumerate(plan.parts):
            if isinstance(part, CallStep):
                buffer = gathers.get(part.index, self._buffers.call_buffers.get(part.index))
                into = {name: gathered[name] for name in part.outputs if name in gathered}
                donatable = part.index in final.assignment.donatable
                compiled.append(BoundCall(part, self._device, self._buffers, may_lack, donatable, buffer, into))
            elif isinstance(part, CopyStep):
                compiled.append(self._device.compile_copy(part))
            elif isinstance(part, Segment):
                compiled.append(self._device.compile_segment(part, graph, plan.types, cache, views, persistent))
            else:
                run = self._device.tuning.compile_run(
                    part, final.aliases[number], graph, plan.types, cache, views or {}
                )
                run.overwrites = final.assignment.aliases_of(run.overwrites)
                compiled.append(run)
        return compiled

    def _result_views(
        self, plan: ExecutionPlan, final: FinalPlan
    ) -> tuple[Mapping[str, Sequence[Any]] | None, Mapping[int, Array]]:
        """The memory of results with the same memory in every step, or None where every step allocates; and the buffers
        of gathers, by number."""
        if not self.plans_memory:
            sent = self._buffers.send_views
            return {name: [self._device.to_device(view)] for name, view in sent.items()} if sent else None, {}
        written = frozenset[str]().union(*final.aliases.values())
        planned = plan_memory(plan.steps, self._last_uses, plan.types, self._buffers, written, self._outputs)
        # What has memory of its own costs nothing while it stays among the values, and neither does an input.
        stable = planned.views.keys() | self._inputs.keys()
        self._last_uses = [tuple(name for name in names if name not in stable) for names in self._last_uses]
        return planned.views, planned.output_buffers

    def _constants_outside(self, graph: Graph) -> dict[str, Any]:
        """Constants outside a session's model: large constants, operands of calls, and outputs."""
        read = {name for step in self._steps for name in step.inputs} | set(self._outputs)
        names = [name for name in graph.initializers if name in read and name not in graph.inputs]
        return {name: self._device.hold(graph.initializers[name].numpy()) for name in names}

    def _forwarded_outputs(self, replaces: Mapping[str, str]) -> frozenset[str]:
        """Outputs that are inputs or constants and replace another state.

        They would alias a fed array or a constant, and alternating buffers would be overwritten while still read."""
        results = {name for step in self._steps for name in step.outputs}
        renamed = {name for name in self._outputs if replaces.get(name, name) != name}
        return frozenset(renamed - results) if self.plans_memory or self._in_place else frozenset()

    def bind_states(self, states: dict[str, Any]) -> None:
        """Move states into their buffers one by one, so that the first step does not need two copies of each state.

        Each rank writes its shard of a shared buffer: a step may run once all ranks have returned. Raises RunError for
        a state of another type or shape."""
        for name in self._inputs.keys() & states.keys():
            _check_fed(name, self._inputs[name], states[name])
        for name in self._inputs.keys() & states.keys() if self.plans_memory else ():
            array = states[name]
            if name in self._buffers.states:
                states[name] = self._buffers.bind_state(name, array)
            elif not is_aligned(array):
                states[name] = aligned(array.shape, array.dtype)
                np.copyto(states[name], array)

    def advance(self, states: dict[str, Any], feeds: Mapping[str, Array], call: CollectiveCallback) -> dict[str, Any]:
        """Run one step on states that stay on the device (``Device.hold``), and replace these by the new states;
        returns the other outputs, as views.

        ``states`` may be shared with the programs of other phases. ``call`` and errors as for ``run``.
        """
        values = self._start(states, feeds)
        self._execute(values, call)
        for name in self._forwarded:
            view = self._device.view(values[name])
            held = self._device.hold_on_host if self._next.get(name) in self._hosted else self._device.hold
            values[name] = held(view.copy() if isinstance(view, np.ndarray) else view)
        unchanged = states is self._advanced and self._in_place.isdisjoint(feeds)
        changed = self._moved if unchanged else self._next
        states.update(zip(changed.values(), map(values.__getitem__, changed)))
        self._advanced = states
        return {name: self._device.view(values[name]) for name in self._shown}

    def hold(self, feeds: Mapping[str, Array]) -> dict[str, HeldInput]:
        """Check and bind the feeds read by the graph, for several runs. The feeds must not change during use. Raises
        RunError for a feed of another type or shape."""
        inputs = {}
        for name in self._inputs.keys() & feeds.keys():
            shown = np.asarray(feeds[name], order="C")
            _check_fed(name, self._inputs[name], shown)
            inputs[name] = HeldInput(self._on_side(name, shown))
        return inputs

    @cached_property
    def _early(self) -> dict[int, list[str]]:
        """The segments computed from inputs alone, by ways without a call, with their results that others read."""
        late: set[str] = set()
        early, read = [], set(self._outputs)
        for number, step in enumerate(self._steps):
            if isinstance(step, BoundCall) or step.overwrites or self.plans_memory or not late.isdisjoint(step.inputs):
                late.update(step.outputs)
                read.update(step.inputs)
            else:
                early.append(number)
        return {number: [name for name in self._steps[number].outputs if name in read] for number in early}

    @cached_property
    def early_inputs(self) -> list[str]:
        """The inputs that ``early`` results of a run follow."""
        return [name for name in self._inputs if any(name in self._steps[number].inputs for number in self._early)]

    def run(
        self, feeds: Mapping[str, Array | HeldInput], call: CollectiveCallback = no_calls,
        early: EarlyResults | None = None,
    ) -> dict[str, Array]:  # fmt: skip
        """Run one step on values for the inputs; returns the graph's outputs.

        A state without a feed has the stored value. Outputs have their own memory, except inputs or constants of the
        graph, which may be the fed arrays. ``call`` is called for every collective in file order; it may return an
        empty list for undefined outputs (Reduce off the root). ``early``: results of an earlier run on equal
        ``early_inputs``, which are not computed again; an empty dict gets them. Raises RunError on feeds of another
        type or shape, and when a segment fails."""
        if unknown := sorted(feeds.keys() - self._inputs.keys()):
            raise RunError(f"the graph has no input {unknown[0]!r}")
        values = self._start({}, feeds)
        self._execute(values, call, early)
        shown = {name: self._device.view(values[name]) for name in self._outputs}
        return shown | {name: shown[name].copy() for name in self._forwarded}

    def _execute(self, values: dict[str, Any], call: CollectiveCallback, early: EarlyResults | None = None) -> None:
        """Run all steps on values for the inputs, and add the results; ``early``: see ``run``."""
        mark, reused = self.mark, early or {}
        recorded = {} if early is None or reused else self._early
        new: EarlyResults = {}
        pending: dict[str, PendingCall] = {}
        steps = zip(self._steps, self._waits, self._last_uses, strict=True)
        for number, (step, waits, gone) in enumerate(steps):
            if pending:
                _finish(pending, waits, step.overwrites, values)
            if isinstance(step, BoundCall):
                results = step.start(values, call)
                if isinstance(results, list):
                    values.update(step.store(results))
                else:
                    pending.update(dict.fromkeys(step.node.outputs or [f"{step.number}"], PendingCall(step, results)))
            elif number in reused:
                values.update(reused[number])
            else:
                begin = time.perf_counter()
                values.update(step.run(values))
                mark(step.title, begin, time.perf_counter())
                if number in recorded:
                    new[number] = {name: values[name] for name in recorded[number]}
            for name in gone:
                values.pop(name, None)
        while pending:
            next(iter(pending.values())).resolve(values, pending)
        if early is not None:
            early.update(new)

    def _start(self, states: dict[str, Any], feeds: Mapping[str, Array | HeldInput]) -> dict[str, Any]:
        """Values for all inputs, and the values with the same memory in every step."""
        values = {**self._fixed, **states}
        for name, array in feeds.items():
            if name in self._inputs:
                values[name] = self._feed(name, array)
        if not self._inputs.keys() <= values.keys():
            for name, type in self._inputs.items():
                if name not in values and name not in self._initial:
                    raise RunError(f"input {name!r} ({type}) was not fed, and the file stores no value")
                if name not in values:
                    values[name] = self._feed(name, self._initial[name].numpy())
        for name, view in self._state_views.items():
            value = values[name]
            if value is view:
                continue
            if value.address != view.address:
                np.copyto(view.array, value.array)
            values[name] = view
            if name in self._in_place and name in states:
                states[name] = view
        return values

    def _feed(self, name: str, array: Any) -> Any:
        """The value of an array fed for an input."""
        if isinstance(array, HeldInput):
            return array.value
        for before, value in self._recent_feeds.get(name, ()):
            if before is array:
                value.persistent = True
                return value
        shown = array if hasattr(array, "dtype") else np.asarray(array)
        _check_fed(name, self._inputs[name], shown)
        if not self.plans_memory:
            return self._on_side(name, shown)
        # Kernels and bindings use the address. No copy is cached, because the array that was fed may change.
        shown = np.asarray(shown, order="C")
        value = self._device.to_device(shown)
        if shown is array:
            self._recent_feeds[name] = [(array, value), *self._recent_feeds.get(name, [])[:1]]
        return value

    def _on_side(self, name: str, shown: Any) -> Any:
        """The value of an array fed for an input, in the memory of the device or of the host."""
        return self._device.hold_on_host(shown) if name in self._hosted else self._device.to_device(shown)


def _finish(
    pending: dict[str, PendingCall], waits: Sequence[str], overwrites: frozenset[str], values: dict[str, Any]
) -> None:
    """Wait for pending calls with results read, or inputs overwritten, by a step."""
    for name in waits:
        if name in pending:
            pending[name].resolve(values, pending)
    for started in {id(call): call for call in pending.values()}.values() if overwrites else ():
        if not overwrites.isdisjoint(started.call.node.inputs):
            started.resolve(values, pending)


def _check_fed(name: str, type: TensorType, array: Array) -> None:
    fits = type.shape is None or (
        len(type.shape) == array.ndim
        and all(size == due for size, due in zip(array.shape, type.shape) if isinstance(due, int))
    )
    if not fits or (known(type.dtype) and array_dtype(array) != type.dtype):
        raise RunError(f"input {name!r} is {type}, but was fed {array.dtype}{list(array.shape)}")
