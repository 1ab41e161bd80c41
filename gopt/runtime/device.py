"""Where a rank's values live: the interface that the executor and the trainer use, and the default, host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.runtime.partition import Segment
from gopt.runtime.planner.assignment import BufferAssignment, MemberIndex
from gopt.runtime.planner.buffers import Buffers, allocate_buffers
from gopt.runtime.planner.memory_planner import BufferViews
from gopt.runtime.session import Array, SessionCache, Value, bind_memory, run_bound
from gopt.runtime.shared_memory import SharedMemory
from gopt.runtime.tuning.tuning import CPU_TUNING, Tuning


class CompiledSegment(Protocol):
    """A segment that is bound to its session."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    title: str
    overwrites: frozenset[str]
    """Inputs whose memory is written."""

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs; raises RunError."""


class Device(Protocol):
    """A place for values. A *view* is how calls and the caller of a program get a value: in host memory, an array."""

    emulates_half: bool
    """Whether operators on halves are lowered to float32 ones."""
    tuning: Tuning
    """What makes steps faster on this device."""

    def sessions(self) -> SessionCache:
        """An empty cache whose sessions run here."""

    def to_device(self, array: Any) -> Any:
        """A value for sessions, of an array or of a view."""

    def view(self, value: Any) -> Any:
        """The inverse of ``to_device``."""

    def to_host(self, array: Any) -> Array:
        """A view as an array in host memory, complete and current."""

    def assign_buffers(self, graph: Graph, replaces: Mapping[str, str], member: MemberIndex | None) -> BufferAssignment:
        """Which values share a buffer, so that calls need no copies; ``replaces``: output -> state. ``member``: group
        -> the rank's position in it; None where ranks share no memory."""

    def allocate_buffers(self, assignment: BufferAssignment, shared: SharedMemory) -> Buffers:
        """The memory of an assignment, with what was granted of shared memory."""

    def compile_segment(
        self,
        segment: Segment,
        session: tuple[tuple[str, ...], Any],
        types: Mapping[str, TensorType],
        views: BufferViews | None,
    ) -> CompiledSegment:
        """A segment whose results lie in ``views`` at every step; None: always in new memory."""


class HostSegment:
    """A segment on the CPU, with results in memory of their own."""

    overwrites: frozenset[str] = frozenset()

    def __init__(self, segment: Segment, session: tuple[tuple[str, ...], Any]) -> None:
        self.outputs = segment.outputs
        self.title = f"segment of {len(segment.nodes)}"
        self.inputs, self._session = session

    def run(self, values: Mapping[str, Value]) -> list[Value]:
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_ortvalue_input(name, values[name].given)
        for name in self.outputs:
            binding.bind_output(name, "cpu")
        run_bound(self._session, binding)
        return [Value(given=result) for result in binding.get_outputs()]


@dataclass(slots=True)
class _Binding:
    """A binding, and what it is bound to."""

    binding: Any
    views: dict[str, Value]
    """Results with fixed memory."""
    bound: dict[str, Value] = field(default_factory=dict)
    """Inputs whose memory is the same in every step."""
    results: list[Value] = field(default_factory=list)
    """All results, when all have fixed memory."""


class BoundSegment(HostSegment):
    """A segment that runs step after step on mostly the same memory: only what moved is bound again.

    It alternates between two bindings, for results that have two buffers and for states that come from such ones.
    """

    def __init__(self, segment: Segment, session: tuple[tuple[str, ...], Any], views: BufferViews) -> None:
        super().__init__(segment, session)
        self._others = [name for name in self.outputs if name not in views]
        self._bindings = []
        for turn in (0, -1):
            current = _Binding(
                self._session.io_binding(), {name: views[name][turn] for name in self.outputs if name in views}
            )
            for name, value in current.views.items():
                current.binding.bind_ortvalue_output(name, value.given)
            current.results = [] if self._others else [current.views[name] for name in self.outputs]
            self._bindings.append(current)

    def run(self, values: Mapping[str, Value]) -> list[Value]:
        self._bindings.reverse()
        current = self._bindings[0]
        binding, bound = current.binding, current.bound
        for name in self.inputs:
            value = values[name]
            if bound.get(name) is not value:
                if value.lasting or not value.addressed:
                    binding.bind_ortvalue_input(name, value.given)
                else:
                    bind_memory(binding.bind_input, name, value.array)
                if value.lasting:
                    bound[name] = value
                else:
                    bound.pop(name, None)
        for name in self._others:
            binding.bind_output(name, "cpu")
        run_bound(self._session, binding)
        if not self._others:
            return current.results
        results = dict(zip([*current.views, *self._others], binding.get_outputs()))
        made = current.views | {name: Value(given=results[name]) for name in self._others}
        return [made[name] for name in self.outputs]


class Host:
    """Host memory: the runtime works on NumPy's own memory, and nothing is copied."""

    emulates_half = True

    def __init__(self, tuning: Tuning = CPU_TUNING) -> None:
        self.tuning = tuning

    def sessions(self) -> SessionCache:
        return SessionCache()

    def to_device(self, array: Array) -> Value:
        return Value(array)

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
        session: tuple[tuple[str, ...], Any],
        types: Mapping[str, TensorType],
        views: BufferViews | None,
    ) -> HostSegment:  # fmt: skip
        return HostSegment(segment, session) if views is None else BoundSegment(segment, session, views)


HOST = Host()
