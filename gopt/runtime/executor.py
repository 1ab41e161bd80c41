"""Graphs cut at their calls and made ready to run.

In training, long elementwise runs go in tiles, and what one call sends lies in one buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gopt.errors import RunError
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType, known
from gopt.opaque.expand import expand
from gopt.runtime.device import HOST, CompiledSegment, Device
from gopt.runtime.emulate_half import emulate_half
from gopt.runtime.memory import aligned, is_aligned, packed_view, same_memory
from gopt.runtime.partition import Call, Segment, last_uses, partition
from gopt.runtime.planner.buffer_assignment import BufferAssignment
from gopt.runtime.planner.fold_transposes import fold_transposes
from gopt.runtime.planner.hazards import find_hazards
from gopt.runtime.planner.memory_planner import plan_memory
from gopt.runtime.planner.tiling import ElementwiseRun, compile_run, split_elementwise
from gopt.runtime.session import (
    Array,
    SessionCache,
    array_dtype,
    session_of,
)


class CollectiveFuture(Protocol):
    """Outputs of a call that is under way, such as a Future."""

    def result(self) -> list[Any]: ...


CollectiveCallback: TypeAlias = Callable[..., list[Any] | CollectiveFuture]
"""What does a collective: number of the call in the file, its node, its inputs -> its outputs, or their promise.

Programs for training may give it a fourth, room: flat memory that the call may write. Of a reduction it is its inputs'
own, of a gather the place for what it makes.
"""


TimingCallback: TypeAlias = Callable[[str, float, float], None]


def no_timing(name: str, begin: float, end: float) -> None:
    """For who is not listening."""


class Executor:
    """A rank's graph, or one without collectives, made ready to run on the CPU, or on another ``device``.

    Halves are lowered to float32 operators on the CPU. ``graph`` is not changed. Raises UnsupportedError where a
    type that is needed is unknown, NoKernelError where the runtime has no kernel, RunError where it refuses.

    ``replaces`` (output -> input) is for training: long elementwise runs go in tiles, a result that replaces a state is
    written over the very array that was fed for it where nothing reads that any more, and what one call sends lies in
    one buffer. Without it no array that was fed is written.
    """

    def __init__(
        self, graph: Graph, cache: SessionCache, replaces: Mapping[str, str] | None = None, device: Device = HOST
    ) -> None:
        graph = expand(graph, "gopt.run")
        self.graph = graph = fold_transposes(emulate_half(graph)) if device.emulates_half else graph
        self._device = device
        self._inputs = graph.inputs
        self._initial = {name: graph.initializers[name] for name in graph.inputs if name in graph.initializers}
        self._outputs = tuple(graph.outputs)
        buffers = BufferAssignment(graph) if replaces is None else device.buffers(graph, replaces)
        self._trains = replaces is not None
        self._plans_memory = self._trains and device.shares_memory
        self._recent_feeds: dict[str, list[tuple[Any, Any]]] = {}
        """What was fed lately, and the value made of it: states mostly come back as they went, or one of two."""
        graph, types = buffers.graph, graph.types | graph.inputs
        steps: list[Segment | ElementwiseRun | Call] = []
        for each in partition(graph):
            steps += split_elementwise(each, types) if self._plans_memory and isinstance(each, Segment) else [each]
        borders = [step.segment if isinstance(step, ElementwiseRun) else step for step in steps]
        aliases = self._input_aliases(steps, borders, replaces or {}, buffers)
        self.common, late = find_hazards(buffers, borders, aliases)
        """Number of a gather -> what ranks may have in common, and when this one reads and writes it."""
        lost = {name for name, call in buffers.local_shards.items() if call not in self.common}
        if lost:  # else a rank keeps all that it gathers for itself
            buffers = buffers.without(lost)
            aliases = self._input_aliases(
                steps, borders, replaces or {}, buffers
            )  # nothing that is gathered has to be read before
        self._assignment = buffers
        self._views = {name: device.to_device(place) for name, place in buffers.views().items()}
        self._last_uses = last_uses(borders, self._outputs)
        self._call_buffers = dict(buffers.gather_buffers)
        """Number of a call -> flat memory that it may write, where that is the same in every step."""
        self._output_views = {name: self._views[name] for name in buffers.gathered_views}
        for place in self._output_views.values() if self._plans_memory else ():
            place.lasting = True
        self._waits = [(*step.inputs, *late.get(place, ())) for place, step in enumerate(borders)]
        """For every step, what must have come before it runs."""
        self._steps = self._compile(steps, borders, aliases, types, cache)
        self._call_buffers |= self._sent_buffers(borders)
        self._constants = self._constants_outside(graph)
        self._forwarded = self._forwarded_outputs(replaces or {})
        self.mark: TimingCallback = no_timing
        """Hears of every segment: its name, and when it began and ended."""

    def _compile(
        self, steps: Sequence[Segment | ElementwiseRun | Call], borders: Sequence[Segment | Call],
        aliases: Mapping[int, dict[str, str]], types: dict[str, TensorType], cache: SessionCache,
    ) -> list[Call | CompiledSegment]:  # fmt: skip
        """Steps with their sessions and memory."""
        graph, buffers = self._assignment.graph, self._assignment
        views: Mapping[str, Sequence[Any]] | None = None
        if self._plans_memory:
            written = frozenset[str]().union(*aliases.values())
            laid = plan_memory(borders, self._last_uses, types, buffers, written, self._outputs)
            views = laid.views
            self._call_buffers |= laid.output_buffers
            gathers = [step for step in borders if isinstance(step, Call) and step.index in laid.output_buffers]
            self._output_views |= {name: laid.views[name][0] for step in gathers for name in step.outputs}
            # What has a place costs nothing more while it stays.
            self._last_uses = [tuple(name for name in gone if name not in laid.views) for gone in self._last_uses]
        elif self._trains:
            views = {name: [self._device.to_device(place)] for name, place in buffers.send_views.items()}
        made: list[Call | CompiledSegment] = []
        for place, step in enumerate(steps):
            if isinstance(step, Call):
                made.append(step)
            elif isinstance(step, Segment):
                made.append(self._device.compile_segment(step, session_of(step, graph, types, cache), types, views))
            else:
                run = compile_run(step, aliases[place], graph, types, cache, views or {})
                run.overwrites = buffers.aliases_of(run.overwrites)
                made.append(run)
        return made

    def _input_aliases(
        self, steps: Sequence[Segment | ElementwiseRun | Call], borders: Sequence[Segment | Call],
        replaces: Mapping[str, str], buffers: BufferAssignment,
    ) -> dict[int, dict[str, str]]:  # fmt: skip
        """Number of a run -> which of its results are written over which of its rows."""
        last = {name: place for place, each in enumerate(borders) for name in each.inputs}
        gather_buffers: dict[int, int] = {}
        """Number of a gather -> the last step that reads what it made."""
        for name in buffers.gathered_views.keys() & buffers.slices.keys():
            call = buffers.slices[name].call
            gather_buffers[call] = max(gather_buffers.get(call, -1), last.get(name, -1))
        found, kept = {}, frozenset(self._outputs)
        for place, step in enumerate(steps):
            if isinstance(step, ElementwiseRun):
                states = {output: replaces[output] for output in step.segment.outputs if output in replaces}
                free = {
                    output: name for output, name in states.items() if last.get(name) == place and name not in kept
                    and (name not in buffers.slices or gather_buffers.get(buffers.slices[name].call, -1) < place)
                }  # fmt: skip
                own = {name: buffers.input_alias(name, step.rows, place, last) for name in step.segment.outputs}
                free |= {name: row for name, row in own.items() if row is not None}
                found[place] = {
                    name: row for name, row in free.items() if row in step.rows and name not in buffers.send_views
                }  # fmt: skip
        return found

    def _sent_buffers(self, borders: Sequence[Segment | Call]) -> dict[int, Array]:
        """Number of a call -> what it sends, one behind the other, where that has its place and is not read again."""
        send_views = self._assignment.send_views
        calls = [step for step in borders if isinstance(step, Call) and step.index in self._assignment.donatable]
        flats = {
            step.index: packed_view([send_views[name] for name in step.inputs])
            for step in calls if step.inputs and all(name in send_views for name in step.inputs)
        }  # fmt: skip
        return {number: flat for number, flat in flats.items() if flat is not None}

    def _constants_outside(self, graph: Graph) -> dict[str, Any]:
        """Constants that stand in no model: large ones, those that a call reads, and those that are outputs."""
        read = {name for step in self._steps for name in step.inputs} | set(self._outputs)
        names = [name for name in graph.initializers if name in read and name not in graph.inputs]
        return {name: self._device.to_device(graph.initializers[name].numpy()) for name in names}

    def _forwarded_outputs(self, replaces: Mapping[str, str]) -> frozenset[str]:
        """Outputs that nothing makes and that become another state: its memory would be that of what is fed, or of a
        constant, and places that take turns are written again while it is still read."""
        made = {name for step in self._steps for name in step.outputs}
        others = {name for name in self._outputs if replaces.get(name, name) != name}
        return frozenset(others - made) if self._plans_memory else frozenset()

    @property
    def engine_buffers(self) -> Mapping[int, Array]:
        """Numbers of calls -> the memory that the engine lent for what they send."""
        return self._assignment.engine_buffers

    def bind_states(self, held: dict[str, Any]) -> None:
        """Put states where they are to lie, one by one, so that the first step need not hold two of each."""
        for name in self._inputs.keys() & held.keys():
            if self._plans_memory:
                array, buffer = held[name], self._assignment.states.get(name)
                if not is_aligned(array) if buffer is None else not same_memory(buffer, array):
                    held[name] = aligned(array.shape, array.dtype) if buffer is None else buffer
                    np.copyto(held[name], array)

    def run(self, feeds: Mapping[str, Array], call: CollectiveCallback) -> dict[str, Array]:
        """One step: values for the inputs in, the graph's outputs out.

        A state that is not fed has its stored value. Outputs are memory of their own, but for those that are inputs
        or constants of the graph, which may be the very arrays that were fed. ``call`` is asked for every collective
        in file order; it may give no outputs where they are undefined (Reduce off its root). Raises RunError on
        feeds that do not fit, and when a segment fails.
        """
        mark = self.mark
        values = self._start(feeds)
        pending: dict[str, _PendingCall] = {}
        for step, waits, dead in zip(self._steps, self._waits, self._last_uses, strict=True):
            for name in waits if pending else ():
                if name in pending:
                    pending[name].resolve(values, pending)
            if isinstance(step, Call):
                self._call(step, values, pending, call)
            else:
                here = {id(each): each for each in pending.values()} if pending and step.overwrites else {}
                for pending_call in here.values():
                    if not step.overwrites.isdisjoint(pending_call.node.inputs):
                        pending_call.resolve(values, pending)
                begin = time.perf_counter()
                values.update(zip(step.outputs, step.run(values), strict=True))
                mark(step.title, begin, time.perf_counter())
            for name in dead:
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
            # Loops and bindings go by the address. A copy is no value of what was given, which may change.
            shown = np.require(shown, requirements="C")
        buffer = self._assignment.states.get(name)
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
        send_views, view, number = self._assignment.send_views, self._device.view, step.index
        given = [send_views[name] if name in send_views else view(values[name]) for name in step.inputs]
        own = self._call_buffers.get(number)
        if own is None and number in self._assignment.donatable:
            own = packed_view(given)
        buffer = self._assignment.engine_buffers.get(number, own)
        results = call(number, step.node, given, *([] if buffer is None else [buffer]))
        pending_call = _PendingCall(step.node, results, self._store_results)
        if not isinstance(results, list):
            pending.update(dict.fromkeys(step.node.outputs or [f"{number}"], pending_call))
        else:
            pending_call.resolve(values, pending)

    def _store_results(self, names: Sequence[str], shown: Sequence[Any]) -> dict[str, Any]:
        """The values of what a call made; what has a room goes there, if the call did not put it there itself."""
        if not names or names[0] not in self._output_views:
            return {name: self._device.to_device(each) for name, each in zip(names, shown) if name}
        # A call has its outputs in one buffer, in this order.
        if not same_memory(shown[0], self._output_views[names[0]].array):
            if names[0] not in self._assignment.gathered_views:
                return {name: self._device.to_device(each) for name, each in zip(names, shown)}
            for name, each in zip(names, shown):
                np.copyto(self._assignment.gathered_views[name], each)
        return {name: self._output_views[name] for name in names}


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """A call under way, or its results."""

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
