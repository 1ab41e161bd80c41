"""A planned graph with its memory and sessions, and the loop that runs it step after step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gopt.errors import RunError
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType, known
from gopt.runtime.device import CompiledSegment
from gopt.runtime.execution_plan import ExecutionPlan, FinalPlan, plan_execution
from gopt.runtime.memory import aligned, is_aligned, packed_view, same_memory
from gopt.runtime.partition import Call, Segment, last_uses
from gopt.runtime.planner.memory_planner import plan_memory
from gopt.runtime.session import Array, SessionCache, array_dtype, session_of
from gopt.runtime.shared_memory import NOT_SHARED, SharedMemory


class CollectiveFuture(Protocol):
    """Outputs of a call that has been started, such as a Future."""

    def result(self) -> list[Any]: ...


CollectiveCallback: TypeAlias = Callable[..., list[Any] | CollectiveFuture]
"""Makes a collective: number of the call in the file, its node, its inputs -> its outputs, or a future of them.

Programs for training may pass a fourth argument, a ``CallBuffer``: memory that the call may write. For a reduction it
holds the inputs, for a gather it is where the result is to lie.
"""


TimingCallback: TypeAlias = Callable[[str, float, float], None]


def no_timing(name: str, begin: float, end: float) -> None:
    """A TimingCallback that does nothing."""


class Executor:
    """A rank's graph, or one without collectives, compiled for its device.

    ``graph``: a graph, which is planned here and not changed, or its plan. ``shared``: the shared memory that was
    granted to the plan, by numbers of calls in the file. Raises UnsupportedError where a type that is needed is
    unknown, NoKernelError where the runtime has no kernel, RunError where it refuses a segment.
    """

    def __init__(self, graph: Graph | ExecutionPlan, cache: SessionCache, shared: SharedMemory = NOT_SHARED) -> None:
        plan = graph if isinstance(graph, ExecutionPlan) else plan_execution(graph)
        final = plan.resolve(shared)
        self.graph = graph = plan.graph
        self._device = plan.device
        self._plans_memory = plan.plans_memory
        self._assignment = final.assignment
        self._buffers = self._device.allocate_buffers(final.assignment, shared)
        self._inputs = graph.inputs
        self._initial = {name: graph.initializers[name] for name in graph.inputs if name in graph.initializers}
        self._outputs = tuple(graph.outputs)
        self._recent_feeds: dict[str, list[tuple[Any, Any]]] = {}
        """The last two arrays fed for an input, with their values: states mostly come back as one of two arrays."""
        self._views = {name: self._device.to_device(view) for name, view in self._buffers.views.items()}
        self._call_buffers = dict(self._buffers.call_buffers)
        """Number of a call -> memory that it may write, where that is the same in every step."""
        self._output_views = {name: self._views[name] for name in self._buffers.gathered_views}
        """What a call makes -> its memory, where that is the same in every step."""
        for value in self._output_views.values() if self._plans_memory else ():
            value.lasting = True
        self._last_uses = last_uses(plan.steps, self._outputs)
        self._waits = final.waits
        self._steps = self._compile(plan, final, cache)
        self._constants = self._constants_outside(graph)
        self._forwarded = self._forwarded_outputs(plan.replaces)
        self.mark: TimingCallback = no_timing
        """Called after every segment with its name, and when it began and ended."""

    def _compile(self, plan: ExecutionPlan, final: FinalPlan, cache: SessionCache) -> list[Call | CompiledSegment]:
        """The steps with their sessions and memory."""
        views, graph = self._result_views(plan, final), final.assignment.graph
        compiled: list[Call | CompiledSegment] = []
        for number, part in enumerate(plan.parts):
            if isinstance(part, Call):
                compiled.append(part)
            elif isinstance(part, Segment):
                session = session_of(part, graph, plan.types, cache)
                compiled.append(self._device.compile_segment(part, session, plan.types, views))
            else:
                run = self._device.tuning.compile_run(
                    part, final.aliases[number], graph, plan.types, cache, views or {}
                )
                run.overwrites = final.assignment.aliases_of(run.overwrites)
                compiled.append(run)
        return compiled

    def _result_views(self, plan: ExecutionPlan, final: FinalPlan) -> Mapping[str, Sequence[Any]] | None:
        """The memory of results that keep it over steps; None where every step makes new arrays."""
        if not self._plans_memory:
            sent = self._buffers.send_views
            return {name: [self._device.to_device(view)] for name, view in sent.items()} if sent else None
        written = frozenset[str]().union(*final.aliases.values())
        planned = plan_memory(plan.steps, self._last_uses, plan.types, self._buffers, written, self._outputs)
        self._call_buffers |= planned.output_buffers
        gathers = [step for step in plan.steps if isinstance(step, Call) and step.index in planned.output_buffers]
        self._output_views |= {name: planned.views[name][0] for step in gathers for name in step.outputs}
        # A result with memory of its own costs nothing while it stays among the values.
        self._last_uses = [tuple(name for name in names if name not in planned.views) for names in self._last_uses]
        return planned.views

    def _constants_outside(self, graph: Graph) -> dict[str, Any]:
        """Constants that are in no model: large ones, those that a call reads, and those that are outputs."""
        read = {name for step in self._steps for name in step.inputs} | set(self._outputs)
        names = [name for name in graph.initializers if name in read and name not in graph.inputs]
        return {name: self._device.to_device(graph.initializers[name].numpy()) for name in names}

    def _forwarded_outputs(self, replaces: Mapping[str, str]) -> frozenset[str]:
        """Outputs that no step makes and that become another state: they would alias what was fed, or a constant, and
        buffers that alternate are written again while they are still read."""
        made = {name for step in self._steps for name in step.outputs}
        others = {name for name in self._outputs if replaces.get(name, name) != name}
        return frozenset(others - made) if self._plans_memory else frozenset()

    def bind_states(self, states: dict[str, Any]) -> None:
        """Move states into their buffers, one by one, so that the first step need not hold two copies of each. Where
        ranks share a buffer, each writes its own shard: a step may run once all ranks have done so."""
        for name in self._inputs.keys() & states.keys() if self._plans_memory else ():
            array = states[name]
            if name in self._buffers.states:
                states[name] = self._buffers.bind_state(name, array)
            elif not is_aligned(array):
                states[name] = aligned(array.shape, array.dtype)
                np.copyto(states[name], array)

    def run(self, feeds: Mapping[str, Array], call: CollectiveCallback) -> dict[str, Array]:
        """Run one step on values for the inputs; returns the graph's outputs.

        A state that is not fed has its stored value. Outputs have memory of their own, except those that are inputs
        or constants of the graph, which may be the arrays that were fed. ``call`` is called for every collective in
        file order; it may return no outputs where they are undefined (Reduce off its root). Raises RunError on feeds
        that do not fit, and when a segment fails.
        """
        mark = self.mark
        values = self._start(feeds)
        pending: dict[str, _PendingCall] = {}
        for step, waits, gone in zip(self._steps, self._waits, self._last_uses, strict=True):
            for name in waits if pending else ():
                if name in pending:
                    pending[name].resolve(values, pending)
            if isinstance(step, Call):
                self._call(step, values, pending, call)
            else:
                unfinished = {id(each): each for each in pending.values()} if pending and step.overwrites else {}
                for pending_call in unfinished.values():
                    if not step.overwrites.isdisjoint(pending_call.node.inputs):
                        pending_call.resolve(values, pending)
                begin = time.perf_counter()
                values.update(zip(step.outputs, step.run(values), strict=True))
                mark(step.title, begin, time.perf_counter())
            for name in gone:
                values.pop(name, None)
        while pending:
            next(iter(pending.values())).resolve(values, pending)
        shown = {name: self._device.view(values[name]) for name in self._outputs}
        return shown | {name: shown[name].copy() for name in self._forwarded}

    def _start(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        unknown = sorted(feeds.keys() - self._inputs.keys())
        if unknown:
            raise RunError(f"the graph has no input {unknown[0]!r}")
        values = self._constants | self._views
        for name, type in self._inputs.items():
            if name in feeds:
                given = feeds[name]
            elif name in self._initial:
                given = self._initial[name].numpy()
            else:
                raise RunError(f"input {name!r} ({type}) was not fed, and the file stores no value")
            for before, value in self._recent_feeds.get(name, ()):
                if before is given:
                    value.lasting = True
                    values[name] = value
                    break
            else:
                values[name] = self._convert_feed(name, type, given)
        return values

    def _convert_feed(self, name: str, type: TensorType, given: Any) -> Any:
        shown = given if hasattr(given, "dtype") else np.asarray(given)
        _check_fed(name, type, shown)
        if self._plans_memory:
            # Kernels and bindings use the address. A copy must not be remembered: what was fed may change.
            shown = np.require(shown, requirements="C")
        buffer = self._buffers.states.get(name)
        if buffer is not None and not same_memory(shown, buffer):
            np.copyto(buffer, shown)
        value = self._device.to_device(shown) if buffer is None else self._views[name]
        if self._plans_memory and shown is given:
            self._recent_feeds[name] = [(given, value), *self._recent_feeds.get(name, [])[:1]]
        return value

    def _call(
        self, step: Call, values: dict[str, Any], pending: dict[str, _PendingCall], call: CollectiveCallback
    ) -> None:
        missing = [name for name in step.inputs if name not in values]
        if missing:
            raise RunError(f"{missing[0]!r} is undefined on this rank, and {step.node.op_type} reads it")
        send_views, view, number = self._buffers.send_views, self._device.view, step.index
        given = [send_views[name] if name in send_views else view(values[name]) for name in step.inputs]
        buffer = self._call_buffers.get(number)
        if buffer is None and number in self._assignment.donatable:
            buffer = packed_view(given)
        results = call(number, step.node, given, *([] if buffer is None else [buffer]))
        pending_call = _PendingCall(step.node, results, self._store_results)
        if not isinstance(results, list):
            pending.update(dict.fromkeys(step.node.outputs or [f"{number}"], pending_call))
        else:
            pending_call.resolve(values, pending)

    def _store_results(self, names: Sequence[str], shown: Sequence[Any]) -> dict[str, Any]:
        """The values of a call's results, copied into their buffer where they have one and the call did not use it."""
        if not names or names[0] not in self._output_views:
            return {name: self._device.to_device(each) for name, each in zip(names, shown) if name}
        # A call's outputs lie in one buffer, in this order.
        if not same_memory(shown[0], self._output_views[names[0]].array):
            if names[0] not in self._buffers.gathered_views:
                return {name: self._device.to_device(each) for name, each in zip(names, shown)}
            for name, each in zip(names, shown):
                np.copyto(self._buffers.gathered_views[name], each)
        return {name: self._output_views[name] for name in names}


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """A call that has been started, or its results."""

    node: Node
    results: list[Any] | CollectiveFuture
    store: Callable[[Sequence[str], Sequence[Any]], dict[str, Any]]

    def resolve(self, values: dict[str, Any], pending: dict[str, _PendingCall]) -> None:
        """Wait for the call and put its outputs among the values."""
        results = self.results if isinstance(self.results, list) else self.results.result()
        names = self.node.outputs
        if results and len(results) != len(names):
            raise RunError(f"{self.node.op_type} {self.node.label!r} gave {len(results)} values, not {len(names)}")
        if results:
            values.update(self.store(names, results))
        for name in [name for name, pending_call in pending.items() if pending_call is self]:
            del pending[name]


def _check_fed(name: str, type: TensorType, array: Array) -> None:
    fits = type.shape is None or (
        len(type.shape) == array.ndim
        and all(size == due for size, due in zip(array.shape, type.shape) if isinstance(due, int))
    )
    if not fits or (known(type.dtype) and array_dtype(array) != type.dtype):
        raise RunError(f"input {name!r} is {type}, but was fed {array.dtype}{list(array.shape)}")
