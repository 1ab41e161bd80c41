"""Where a rank's values live: what Program and Trainer ask of that place. Here the default, host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.runtime.allocator import NO_ALLOCATOR, Allocator
from gopt.runtime.partition import Segment
from gopt.runtime.planner.buffer_assignment import BufferAssignment, assign_buffers
from gopt.runtime.planner.memory_planner import BufferViews
from gopt.runtime.session import Array, SessionCache, Value, bind_memory, run_bound


class CompiledSegment(Protocol):
    """A segment with its session, made ready."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    title: str
    overwrites: frozenset[str]
    """Inputs whose memory is written."""

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs; raises RunError."""


class Device(Protocol):
    """A place for values. *Shown* is how calls and the caller of a program get a value: in host memory, an array."""

    emulates_half: bool
    """Whether operators on halves are lowered to float32 ones."""
    shares_memory: bool
    """Whether a value made of an array is the array's own memory, and changes with it: then results have fixed places
    in host memory, and long elementwise runs are done there."""

    def sessions(self) -> SessionCache:
        """An empty cache whose sessions run here."""

    def to_device(self, array: Any) -> Any:
        """A value for sessions: of an array, or of what is shown already."""

    def view(self, value: Any) -> Any:
        """The inverse of put."""

    def to_host(self, array: Any) -> Array:
        """An array in host memory, whole and current."""

    def buffers(self, graph: Graph, replaces: Mapping[str, str]) -> BufferAssignment:
        """Where values lie so that calls need no copies, shown; ``replaces``: output -> state."""

    def compile_segment(
        self,
        segment: Segment,
        session: tuple[tuple[str, ...], Any],
        types: Mapping[str, TensorType],
        views: BufferViews | None,
    ) -> CompiledSegment:
        """A segment made ready, step after step with its results in these places; None: always in new ones."""


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
class _Side:
    """A binding, and what it is bound to."""

    binding: Any
    views: dict[str, Value]
    """Results that always lie there."""
    bound: dict[str, Value] = field(default_factory=dict)
    results: list[Value] = field(default_factory=list)
    """Of places alone, when there is nothing else."""


class BoundSegment(HostSegment):
    """A segment that runs step after step, on what is mostly the same memory: only what moved is bound anew.

    It has two sides, in turn, for results that have two places, and for states that come from such ones.
    """

    def __init__(self, segment: Segment, session: tuple[tuple[str, ...], Any], views: BufferViews) -> None:
        super().__init__(segment, session)
        self._others = [name for name in self.outputs if name not in views]
        self._sides = []
        for turn in (0, -1):
            side = _Side(
                self._session.io_binding(), {name: views[name][turn] for name in self.outputs if name in views}
            )
            for name, value in side.views.items():
                side.binding.bind_ortvalue_output(name, value.given)
            side.results = [] if self._others else [side.views[name] for name in self.outputs]
            self._sides.append(side)

    def run(self, values: Mapping[str, Value]) -> list[Value]:
        self._sides.reverse()
        side = self._sides[0]
        binding, bound = side.binding, side.bound
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
            return side.results
        results = dict(zip([*side.views, *self._others], binding.get_outputs()))
        made = side.views | {name: Value(given=results[name]) for name in self._others}
        return [made[name] for name in self.outputs]


class Host:
    """Host memory: the runtime works on NumPy's own memory, and nothing is copied. An engine may be the ``lender`` of
    memory that its calls need."""

    emulates_half = True
    shares_memory = True

    def __init__(self, allocator: Allocator = NO_ALLOCATOR) -> None:
        self._allocator = allocator

    def sessions(self) -> SessionCache:
        return SessionCache()

    def to_device(self, array: Array) -> Value:
        return Value(array)

    def view(self, value: Value) -> Array:
        return value.array

    def to_host(self, array: Array) -> Array:
        return array

    def buffers(self, graph: Graph, replaces: Mapping[str, str]) -> BufferAssignment:
        return assign_buffers(graph, replaces, self._allocator)

    def compile_segment(
        self,
        segment: Segment,
        session: tuple[tuple[str, ...], Any],
        types: Mapping[str, TensorType],
        views: BufferViews | None,
    ) -> HostSegment:  # fmt: skip
        return HostSegment(segment, session) if views is None else BoundSegment(segment, session, views)


HOST = Host()
