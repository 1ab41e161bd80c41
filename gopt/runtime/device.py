"""Where a rank's values live: what Program and Trainer ask of that place. Here the default, host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gopt.graph.model import Graph
from gopt.graph.types import TensorType
from gopt.runtime.cut import Call, Segment
from gopt.runtime.session import Array, SessionCache, array_of, run_bound, runtime_value
from gopt.runtime.tiles import call_rooms


class Piece(Protocol):
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

    lowers: bool
    """Whether operators on halves are lowered to float32 ones."""
    tiles: bool
    """Whether long elementwise runs go in tiles that fit a cache."""

    def sessions(self) -> SessionCache:
        """An empty cache whose sessions run here."""

    def put(self, shown: Any) -> Any:
        """A value for sessions: of an array, or of what is shown already."""

    def show(self, value: Any) -> Any:
        """The inverse of put."""

    def down(self, shown: Any) -> Array:
        """An array in host memory, whole and current."""

    def rooms(self, calls: Sequence[Call], graph: Graph) -> Mapping[str, Any]:
        """For what one call sends together, memory in one buffer: value -> where it lies, shown."""

    def piece(
        self, segment: Segment, session: tuple[tuple[str, ...], Any], rooms: Mapping[str, Any],
        types: Mapping[str, TensorType],
    ) -> Piece:  # fmt: skip
        """A segment made ready. ``rooms``: memory in which some results are to lie."""


class HostPiece:
    """A segment on the CPU."""

    overwrites: frozenset[str] = frozenset()

    def __init__(self, segment: Segment, session: tuple[tuple[str, ...], Any], rooms: Mapping[str, Any]) -> None:
        self.outputs = segment.outputs
        self.title = f"segment of {len(segment.nodes)}"
        self.inputs, self._session = session
        self._rooms = {name: rooms[name] for name in self.outputs if name in rooms}

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_ortvalue_input(name, values[name])
        for name in self.outputs:
            if name in self._rooms:
                binding.bind_ortvalue_output(name, self._rooms[name])
            else:
                binding.bind_output(name, "cpu")
        run_bound(self._session, binding)
        results: list[Any] = binding.get_outputs()
        return [self._rooms.get(name, result) for name, result in zip(self.outputs, results)]


class Host:
    """Host memory: values are the runtime's over NumPy's own memory, and nothing is copied."""

    lowers = True
    tiles = True

    def sessions(self) -> SessionCache:
        return SessionCache()

    def put(self, shown: Array) -> Any:
        return runtime_value(shown)

    def show(self, value: Any) -> Array:
        return array_of(value)

    def down(self, shown: Array) -> Array:
        return shown

    def rooms(self, calls: Sequence[Call], graph: Graph) -> Mapping[str, Array]:
        return call_rooms(calls, graph)

    def piece(
        self, segment: Segment, session: tuple[tuple[str, ...], Any], rooms: Mapping[str, Any],
        types: Mapping[str, TensorType],
    ) -> HostPiece:  # fmt: skip
        return HostPiece(segment, session, rooms)


HOST = Host()
