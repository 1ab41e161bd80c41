"""Where a rank's values live: what Program and Trainer ask of that place. Here the default, host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gopt.graph.model import Graph
from gopt.graph.types import TensorType
from gopt.runtime.cut import Segment
from gopt.runtime.rooms import Rooms, lay_out
from gopt.runtime.session import Array, SessionCache, Value, run_bound


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
    shares: bool
    """Whether a value made of an array is the array's own memory, and changes with it."""

    def sessions(self) -> SessionCache:
        """An empty cache whose sessions run here."""

    def put(self, shown: Any) -> Any:
        """A value for sessions: of an array, or of what is shown already."""

    def show(self, value: Any) -> Any:
        """The inverse of put."""

    def down(self, shown: Any) -> Array:
        """An array in host memory, whole and current."""

    def rooms(self, graph: Graph, replaces: Mapping[str, str]) -> Rooms:
        """Where values lie so that calls need no copies, shown; ``replaces``: output -> state."""

    def piece(
        self, segment: Segment, session: tuple[tuple[str, ...], Any], rooms: Mapping[str, Any],
        types: Mapping[str, TensorType],
    ) -> Piece:  # fmt: skip
        """A segment made ready. ``rooms``: memory in which some results are to lie."""


class HostPiece:
    """A segment on the CPU."""

    overwrites: frozenset[str] = frozenset()

    def __init__(self, segment: Segment, session: tuple[tuple[str, ...], Any], rooms: Mapping[str, Value]) -> None:
        self.outputs = segment.outputs
        self.title = f"segment of {len(segment.nodes)}"
        self.inputs, self._session = session
        self._rooms = {name: rooms[name] for name in self.outputs if name in rooms}

    def run(self, values: Mapping[str, Value]) -> list[Value]:
        binding = self._session.io_binding()
        for name in self.inputs:
            binding.bind_ortvalue_input(name, values[name].given)
        for name in self.outputs:
            if name in self._rooms:
                binding.bind_ortvalue_output(name, self._rooms[name].given)
            else:
                binding.bind_output(name, "cpu")
        run_bound(self._session, binding)
        results = binding.get_outputs()
        return [self._rooms.get(name) or Value(given=result) for name, result in zip(self.outputs, results)]


class Host:
    """Host memory: the runtime works on NumPy's own memory, and nothing is copied."""

    lowers = True
    tiles = True
    shares = True

    def sessions(self) -> SessionCache:
        return SessionCache()

    def put(self, shown: Array) -> Value:
        return Value(shown)

    def show(self, value: Value) -> Array:
        return value.array

    def down(self, shown: Array) -> Array:
        return shown

    def rooms(self, graph: Graph, replaces: Mapping[str, str]) -> Rooms:
        return lay_out(graph, replaces)

    def piece(
        self, segment: Segment, session: tuple[tuple[str, ...], Any], rooms: Mapping[str, Any],
        types: Mapping[str, TensorType],
    ) -> HostPiece:  # fmt: skip
        return HostPiece(segment, session, rooms)


HOST = Host()
