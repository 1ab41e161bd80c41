"""The result of buffer assignment: the values of each shared buffer, and their offsets. No memory is allocated yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from gopt.ir.graph import Graph, Node

MemberIndex: TypeAlias = Callable[[str], int]
"""Group -> this rank's position among its members."""


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Elements ``start`` to ``stop`` of the buffer of the gather with the index ``call`` in the file."""

    call: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SendBuffer:
    """The flat buffer of a call's sent data. ``packed``: useful even without sharing."""

    call: Node
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    count: int
    dtype: np.dtype[Any]
    packed: bool


@dataclass(frozen=True, slots=True)
class GatherBuffer:
    """The flat buffer of a gather's result; ``calls``: the indices of all gathers with this result.

    ``states``: state -> elements and shape. ``outputs``: the same for the results of each gather."""

    call: Node
    calls: tuple[int, ...]
    count: int
    dtype: np.dtype[Any]
    states: dict[str, tuple[BufferSlice, tuple[int, ...]]]
    outputs: dict[str, tuple[BufferSlice, tuple[int, ...]]]
    member: int | None
    """This rank's position in the group, where all members may share the buffer."""

    @property
    def cuts(self) -> Sequence[int]:
        cuts: Sequence[int] = self.call.attributes["cuts"]
        return cuts

    def owns(self, extent: BufferSlice) -> bool:
        """Return whether this rank writes all of these elements."""
        member = self.member
        return member is not None and self.cuts[member] <= extent.start and extent.stop <= self.cuts[member + 1]


@dataclass(frozen=True, slots=True)
class BufferAssignment:
    """Buffers of a rank's graph. ``graph``: the graph without nodes that only slice states; their results are views."""

    graph: Graph
    sends: dict[int, SendBuffer] = field(default_factory=dict)
    """Number of a call -> the buffer of what it sends."""
    donatable: frozenset[int] = frozenset()
    """Numbers of the calls that may overwrite their inputs: nothing reads those afterwards."""
    gathers: dict[int, GatherBuffer] = field(default_factory=dict)
    """Number of the first gather that makes it -> the buffer."""
    local_shards: dict[str, int] = field(default_factory=dict)
    """State that is this rank's shard of a shared buffer -> the number of that gather. Empty without sharing."""
    slices: dict[str, BufferSlice] = field(default_factory=dict)
    """States, what gathers make of local shards, and slices of states -> their elements."""
    buffer_values: dict[int, list[str]] = field(default_factory=dict)
    """Number of a gather -> the values that lie in its buffer."""
    own_slices: dict[str, frozenset[BufferSlice]] = field(default_factory=dict)
    """Operand of a gather -> the shards of its buffer, the rank's own among them."""

    @property
    def send_names(self) -> frozenset[str]:
        """The values of send buffers that exist even without shared memory."""
        return frozenset(name for send in self.sends.values() if send.packed for name in send.names)

    def without(self, calls: Collection[int]) -> BufferAssignment:
        """The assignment without the buffers of these gathers."""
        if not calls:
            return self
        return replace(
            self,
            gathers={call: buffer for call, buffer in self.gathers.items() if call not in calls},
            local_shards={name: call for name, call in self.local_shards.items() if call not in calls},
            slices={name: extent for name, extent in self.slices.items() if extent.call not in calls},
            buffer_values={call: names for call, names in self.buffer_values.items() if call not in calls},
        )

    def aliases_of(self, names: Iterable[str]) -> frozenset[str]:
        """These values and all others in the same buffers, with memory that may change when ``names`` are written."""
        values = frozenset(names)
        calls = {self.slices[name].call for name in values if name in self.slices}
        return values.union(*(self.buffer_values[call] for call in calls))

    def input_alias(self, name: str, rows: Sequence[str], step: int, last: Mapping[str, int]) -> str | None:
        """The operand that a step may overwrite with ``name``, which a gather sends.

        The operand is this rank's slice of the gather's buffer, if the step is the slice's last reader and all other
        values of the buffer have been read. ``last``: value -> number of the last reading step. None without such an
        operand."""
        slices = self.own_slices.get(name, frozenset())
        row = next((row for row in rows if self.slices.get(row) in slices), None)
        if row is None:
            return None
        neighbours = (value for value in self.buffer_values[self.slices[row].call] if value != row)
        free = last[row] == step and all(last.get(value, -1) < step for value in neighbours)
        return row if free else None
