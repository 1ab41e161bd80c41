"""Device memory of a rank: the interface for executor and trainer, and the default, host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.runtime.host_value import Value, bind_memory
from gopt.runtime.partition import CopyStep, Segment
from gopt.runtime.planner.assignment import BufferAssignment, MemberIndex
from gopt.runtime.planner.buffers import Buffers, allocate_buffers
from gopt.runtime.planner.memory_planner import BufferViews
from gopt.runtime.session import Array, SessionCache, results_of, run_bound, session_of
from gopt.runtime.shared_memory import SharedMemory
from gopt.runtime.tuning.tuning import CPU_TUNING, Tuning


class CompiledSegment(Protocol):
    """A segment bound to a session."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    title: str
    overwrites: frozenset[str]
    """Inputs whose memory is written."""

    def run(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the outputs by name, without the ``persistent`` values, whose memory never changes. Raises
        RunError."""


class Device(Protocol):
    """The memory and sessions of a rank. A *view* is the form of a value for calls and callers: in host memory, an
    array."""

    emulates_half: bool
    """Whether operators on halves are lowered to float32 ones, and transposed operands are read in place."""
    tuning: Tuning
    """Step optimizations on this device."""
    has_host: bool
    """Whether the host has a memory beside the device's."""

    def sessions(self) -> SessionCache:
        """An empty cache of sessions for this device."""

    def to_device(self, array: Any) -> Any:
        """Return a value for sessions, made of an array or a view."""

    def hold(self, array: Any) -> Any:
        """As ``to_device``, for an array or view that exists as long as the value; a copy on devices other than the
        host's."""

    def hold_on_host(self, array: Any) -> Any:
        """As ``hold``, in the memory of the host."""

    def view(self, value: Any) -> Any:
        """The inverse of ``to_device``."""

    def to_host(self, array: Any) -> Array:
        """Return a view as an array in host memory, after all pending work on the view."""

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        """Assign values to shared buffers, so that calls need no copies.

        ``replaces``: output -> state. ``member``: group -> the rank's position in the group; None where ranks share no
        memory."""

    def allocate_buffers(self, assignment: BufferAssignment, shared: SharedMemory) -> Buffers:
        """Allocate the buffers of an assignment; ``shared``: the granted shared memory."""

    def compile_segment(
        self,
        segment: Segment,
        graph: Graph,
        types: dict[str, TensorType],
        cache: SessionCache,
        views: BufferViews | None,
        persistent: Mapping[str, Any],
    ) -> CompiledSegment:
        """Compile a segment of a graph with results in ``views`` at every step; None allocates new memory in each step.

        ``types`` gets the types of the segment's results; ``persistent``: values with the same memory in every
        step."""

    def compile_copy(self, step: CopyStep) -> CompiledSegment:
        """Compile copies between the memory of the device and of the host, where ``has_host``."""


class WithoutHost:
    """A device without copies to a host: all values are on the device."""

    has_host = False

    def hold_on_host(self, array: Any) -> Any:
        raise NotImplementedError

    def compile_copy(self, step: CopyStep) -> CompiledSegment:
        raise NotImplementedError


class HostSegment:
    """A segment on the CPU, with results in memory of their own."""

    overwrites: frozenset[str] = frozenset()

    def __init__(self, segment: Segment, session: tuple[tuple[str, ...], Any]) -> None:
        self.outputs = segment.outputs
        self.title = segment.title
        self.inputs, self._session = session

    def run(self, values: Mapping[str, Value]) -> dict[str, Value]:
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_ortvalue_input(name, values[name].given)
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        run_bound(self._session, binding)
        return {name: Value(native=result) for name, result in zip(self.outputs, results_of(binding), strict=True)}


@dataclass(slots=True)
class _Binding:
    """A binding of ONNX Runtime, and the bound values."""

    binding: Any
    results: dict[str, Value]
    """Results with fixed memory that another buffer has in the next step."""
    bound: list[Value | None]
    """Inputs in order: the value that is bound and has the same memory in every step."""
    fixed: int
    """Results with fixed memory: they are bound first."""


class BoundSegment(HostSegment):
    """A segment with inputs and outputs bound from step to step; only values with changed memory are bound again.

    The segment alternates between two bindings, for results with two buffers and for states among such results."""

    def __init__(
        self,
        segment: Segment,
        session: tuple[tuple[str, ...], Any],
        views: BufferViews,
        persistent: Mapping[str, Value],
    ) -> None:
        super().__init__(segment, session)
        self._moving = tuple(name for name in self.inputs if name not in persistent)
        self._persistent = {name: persistent[name] for name in self.inputs if name in persistent}
        self._others = [name for name in self.outputs if name not in views]
        self._bindings = []
        for turn in (0, -1):
            results = {name: views[name][turn] for name in self.outputs if name in views}
            moving = {name: value for name, value in results.items() if name not in persistent}
            current = _Binding(self._session.io_binding(), moving, [None] * len(self._moving), len(results))
            for name, value in self._persistent.items():
                current.binding.bind_ortvalue_input(name, value.given)
            for name, value in results.items():
                current.binding.bind_ortvalue_output(name, value.given)
            self._bindings.append(current)

    def run(self, values: Mapping[str, Value]) -> dict[str, Value]:
        self._bindings.reverse()
        current = self._bindings[0]
        binding = current.binding
        moved = list(map(values.__getitem__, self._moving))
        if moved != current.bound:  # values are equal where they are the same
            self._bind_moved(current, moved)
        for name in self._others:
            binding.bind_output(name, "cpu")
        run_bound(self._session, binding)
        if not self._others:
            return current.results
        new = results_of(binding)[current.fixed :]
        return current.results | {name: Value(native=result) for name, result in zip(self._others, new, strict=True)}

    def _bind_moved(self, current: _Binding, values: Sequence[Value]) -> None:
        """Bind the inputs with changed memory."""
        bound = current.bound
        for number, (name, value) in enumerate(zip(self._moving, values)):
            if bound[number] is not value:
                bound[number] = value if value.persistent else None
                if value.persistent or not value.addressed:
                    current.binding.bind_ortvalue_input(name, value.given)
                else:
                    bind_memory(current.binding.bind_input, name, value.array)


class Host(WithoutHost):
    """Host memory: the runtime works on NumPy's own memory, and nothing is copied."""

    emulates_half = True

    def __init__(self, tuning: Tuning = CPU_TUNING) -> None:
        self.tuning = tuning

    def sessions(self) -> SessionCache:
        return SessionCache()

    def to_device(self, array: Array) -> Value:
        return Value(array)

    def hold(self, array: Array) -> Value:
        return Value(np.require(array, requirements="C"), persistent=True)

    def view(self, value: Value) -> Array:
        return value.array

    def to_host(self, array: Array) -> Array:
        return array

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        return self.tuning.assign_buffers(graph, replaces, member)

    def allocate_buffers(self, assignment: BufferAssignment, shared: SharedMemory) -> Buffers:
        return allocate_buffers(assignment, shared)

    def compile_segment(
        self,
        segment: Segment,
        graph: Graph,
        types: dict[str, TensorType],
        cache: SessionCache,
        views: BufferViews | None,
        persistent: Mapping[str, Any],
    ) -> HostSegment:
        session = session_of(segment, graph, types, cache)
        return HostSegment(segment, session) if views is None else BoundSegment(segment, session, views, persistent)


HOST = Host()
