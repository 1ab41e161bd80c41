"""Where what a program makes lies, step after step: found once, so that no step asks for memory or binds it anew.

What a call sends with other values lies in the call's buffer, and what a gather makes one behind the other. What
outlives a step has two places that take turns: one may still be read while the other is written. All else shares
memory: a place is free for others of its size when the last step that reads it is done. What a call reads shares with
nobody, for the call may run beside the steps that follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.memory import aligned, unpack_views
from gopt.runtime.partition import Call, ProgramStep, Segment
from gopt.runtime.planner.buffer_assignment import BufferAssignment
from gopt.runtime.session import Array, Value

BufferViews: TypeAlias = Mapping[str, Sequence[Value]]
"""Result -> its place, or the two that take turns; without those whose shape or type leaves it to the runtime."""

_NUMPY_TYPES = frozenset({
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
})  # fmt: skip
"""Types that NumPy has of its own."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``landing``: number of a gather -> flat memory for what it makes."""

    views: dict[str, list[Value]]
    output_buffers: dict[int, Array]


def plan_memory(
    steps: Sequence[ProgramStep], last_uses: Sequence[Sequence[str]], types: Mapping[str, TensorType],
    buffers: BufferAssignment, aliases: Collection[str], kept: Collection[str],
) -> MemoryPlan:  # fmt: skip
    """Places for what these steps make, in this order; ``dead``: for every step, what nobody reads after it. Linear.

    ``over``: results that are written over a row; ``kept``: those that outlive a step.
    """
    views = {name: [Value(place, lasting=True)] for name, place in buffers.send_views.items()}
    output_buffers: dict[int, Array] = {}
    waited = {name for step in steps if isinstance(step, Call) for name in step.inputs}
    free: dict[int, list[Array]] = {}
    shared: dict[str, _ReusedMemory] = {}

    def place(names: Sequence[str]) -> Array:
        """Memory, flat, that these of one type share with whoever is not alive with any of them."""
        size = sum(types[name].nbytes for name in names)
        again = free.get(size)
        memory = again.pop() if again else aligned([size], np.dtype(np.uint8))
        flat = memory.view(numpy_dtype(types[names[0]].dtype))
        rows = unpack_views(flat, [types[name].dims for name in names])
        views.update((name, [Value(row, lasting=True)]) for name, row in zip(names, rows))
        shared.update(dict.fromkeys(names, _ReusedMemory(memory, len(names))))
        return flat

    for step, gone in zip(steps, last_uses, strict=True):
        if isinstance(step, Segment):
            for name in step.outputs:
                if name in views or name in aliases or not _is_planned(name, types):
                    continue
                if name in kept:
                    made = types[name]
                    views[name] = [Value(aligned(made.dims, numpy_dtype(made.dtype)), lasting=True) for _ in range(2)]
                else:
                    place([name])
        elif (
            step.index not in buffers.gather_buffers
            and _has_output_buffer(step, types)
            and not any(name in kept for name in step.outputs)
        ):
            output_buffers[step.index] = place(step.outputs)
        for name in gone:
            # Nobody waits for a call whose result nobody reads, and so its memory is never known to be free.
            if name in shared and name not in waited and not (isinstance(step, Call) and name in step.outputs):
                shared[name].users -= 1
                if not shared[name].users:
                    free.setdefault(shared[name].memory.nbytes, []).append(shared[name].memory)
    return MemoryPlan(views, output_buffers)


@dataclass(slots=True)
class _ReusedMemory:
    """Memory, and how many of the results in it may still be read."""

    memory: Array
    users: int


def _is_planned(name: str, types: Mapping[str, TensorType]) -> bool:
    type = types.get(name)
    return type is not None and bool(type.elements) and type.dtype in _NUMPY_TYPES


def _has_output_buffer(call: Call, types: Mapping[str, TensorType]) -> bool:
    """Whether a call makes values that lie one behind the other."""
    if call.node.op_type != "AllGather" or "cuts" not in call.node.attributes:
        return False
    names = call.node.outputs
    return all(_is_planned(name, types) for name in names) and len({types[name].dtype for name in names}) == 1
