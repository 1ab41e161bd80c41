"""Allocates the memory of a buffer assignment: granted shared memory, else memory of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gopt.runtime.host_value import address_of
from gopt.runtime.memory import aligned, unpack_views
from gopt.runtime.planner.assignment import BufferAssignment, GatherBuffer
from gopt.runtime.session import Array
from gopt.runtime.shared_memory import CallBuffer, SharedGather, SharedMemory


@dataclass(frozen=True, slots=True)
class Buffers:
    """Memory of values at every step, in the device's form."""

    send_views: Mapping[str, Any] = field(default_factory=dict)
    """Value that a call sends -> its view of the call's buffer."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """State -> its part of a gather's buffer."""
    gathered_views: Mapping[str, Array] = field(default_factory=dict)
    """Value that a gather produces -> its view of the gather's buffer."""
    slice_views: Mapping[str, Array] = field(default_factory=dict)
    """Slice of states -> its part of a gather's buffer."""
    call_buffers: Mapping[int, CallBuffer] = field(default_factory=dict)
    """Number of a call -> the flat memory that it may write."""
    shared: Mapping[str, SharedGather] = field(default_factory=dict)
    """State in a shared buffer -> that buffer."""

    @property
    def views(self) -> dict[str, Array]:
        """Return all values with views of gather buffers."""
        return {**self.slice_views, **self.states, **self.gathered_views}

    def bind_state(self, name: str, value: Array) -> Array:
        """Copy a state's value into the state's buffer, and return the view there. A rank writes only its shard of a
        shared buffer."""
        view, shared = self.states[name], self.shared.get(name)
        if shared is None:
            np.copyto(view, value)
        else:
            start = (address_of(view) - address_of(shared.memory)) // view.itemsize
            begin, last = (max(cut - start, 0) for cut in shared.cuts[shared.member : shared.member + 2])
            np.copyto(view.reshape(-1)[begin:last], value.reshape(-1)[begin:last])
        return view


def allocate_buffers(assignment: BufferAssignment, shared: SharedMemory) -> Buffers:
    """Allocate all buffers; ``shared``: the granted shared memory, by the index of the call in the file."""
    send_views: dict[str, Array] = {}
    call_buffers: dict[int, CallBuffer] = {}
    for number, send in assignment.sends.items():
        granted = shared.sends.get(number)
        if granted is None and not send.packed:
            continue
        flat = aligned([send.count], send.dtype) if granted is None else granted.memory
        send_views.update(zip(send.names, unpack_views(flat, send.shapes)))
        if number in assignment.donatable:
            call_buffers[number] = flat if granted is None else granted
    flats: dict[int, Array] = {}
    states: dict[str, Array] = {}
    gathered: dict[str, Array] = {}
    for number, gather in assignment.gathers.items():
        granted_gather = shared.gathers.get(number)
        flats[number] = aligned([gather.count], gather.dtype) if granted_gather is None else granted_gather.memory
        states |= {name: flats[number][at.start : at.stop].reshape(dims) for name, (at, dims) in gather.states.items()}
        gathered |= {
            name: flats[number][at.start : at.stop].reshape(dims) for name, (at, dims) in gather.outputs.items()
        }
        call_buffers |= _gather_call_buffers(gather, flats[number], granted_gather)
    types = assignment.graph.types
    slices = {
        name: flats[at.call][at.start : at.stop].reshape(types[name].dims)
        for name, at in assignment.slices.items() if name not in states and name not in gathered
    }  # fmt: skip
    in_shared = {
        name: shared.gathers[number]
        for number, gather in assignment.gathers.items() if number in shared.gathers for name in gather.states
    }  # fmt: skip
    return Buffers(send_views, states, gathered, slices, call_buffers, in_shared)


def _gather_call_buffers(gather: GatherBuffer, flat: Array, shared: SharedGather | None) -> dict[int, CallBuffer]:
    if shared is None:
        return dict.fromkeys(gather.calls, flat)
    return {number: replace(shared, filled=number != gather.calls[0]) for number in gather.calls}
