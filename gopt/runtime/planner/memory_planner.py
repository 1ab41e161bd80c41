"""Assigns memory to every result of a program once, so that no step allocates or binds memory again.

Results sent by a call lie in the call's buffer, and the results of a gather are adjacent. A result that outlives a step
has two alternating buffers: one may be read while the other is written. All other results reuse memory: a buffer is
free for results of the same size after the last use of its value. The operands of a call are not reused within a step,
because the call may overlap the following steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from gopt.ir.types import TensorType, numpy_dtype
from gopt.runtime.host_value import Value
from gopt.runtime.memory import aligned, unpack_views
from gopt.runtime.partition import CallStep, ProgramStep, Segment
from gopt.runtime.planner.buffers import Buffers
from gopt.runtime.session import Array

BufferViews: TypeAlias = Mapping[str, Sequence[Value]]
"""Result -> its buffer, or the two that alternate; without results whose shape or type leaves it to the runtime."""

_NUMPY_TYPES = frozenset({
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
})  # fmt: skip
"""Types that NumPy has of its own."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """``views``: result -> memory. ``output_buffers``: index of a gather -> the flat buffer of the results."""

    views: dict[str, list[Value]]
    output_buffers: dict[int, Array]


def plan_memory(
    steps: Sequence[ProgramStep], last_uses: Sequence[Sequence[str]], types: Mapping[str, TensorType],
    buffers: Buffers, aliases: Collection[str], outliving: Collection[str],
) -> MemoryPlan:  # fmt: skip
    """Assign memory to the results of these steps, in this order. Linear time.

    ``last_uses``: per step, the values last used there. ``aliases``: results that overwrite an operand. ``outliving``:
    results that outlive a step."""
    views = {name: [Value(view, persistent=True)] for name, view in buffers.send_views.items()}
    output_buffers: dict[int, Array] = {}
    waited = {name for step in steps if isinstance(step, CallStep) for name in step.inputs}
    free: dict[int, list[Array]] = {}
    reused: dict[str, _ReusedMemory] = {}

    def allocate(names: Sequence[str]) -> Array:
        """Flat memory for results of one type, free or new."""
        size = sum(types[name].nbytes for name in names)
        fitting = free.get(size)
        memory = fitting.pop() if fitting else aligned([size], np.dtype(np.uint8))
        flat = memory.view(numpy_dtype(types[names[0]].dtype))
        rows = unpack_views(flat, [types[name].dims for name in names])
        views.update((name, [Value(row, persistent=True)]) for name, row in zip(names, rows))
        reused.update(dict.fromkeys(names, _ReusedMemory(memory, len(names))))
        return flat

    for step, gone in zip(steps, last_uses, strict=True):
        if isinstance(step, Segment):
            for name in step.outputs:
                if name in views or name in aliases or not _is_planned(name, types):
                    continue
                if name in outliving:
                    dims, dtype = types[name].dims, numpy_dtype(types[name].dtype)
                    views[name] = [Value(aligned(dims, dtype), persistent=True) for _ in range(2)]
                else:
                    allocate([name])
        elif (
            isinstance(step, CallStep)
            and buffers.gathered_views.keys().isdisjoint(step.outputs)
            and _has_output_buffer(step, types)
            and not any(name in outliving for name in step.outputs)
        ):
            output_buffers[step.index] = allocate(step.outputs)
        for name in gone:
            # No step waits for a call whose result is not read, so its memory is never known to be free.
            if name in reused and name not in waited and not (isinstance(step, CallStep) and name in step.outputs):
                reused[name].users -= 1
                if not reused[name].users:
                    free.setdefault(reused[name].memory.nbytes, []).append(reused[name].memory)
    return MemoryPlan(views, output_buffers)


@dataclass(slots=True)
class _ReusedMemory:
    """Memory, and the number of results still to be read."""

    memory: Array
    users: int


def _is_planned(name: str, types: Mapping[str, TensorType]) -> bool:
    type = types.get(name)
    return type is not None and bool(type.elements) and type.dtype in _NUMPY_TYPES


def _has_output_buffer(call: CallStep, types: Mapping[str, TensorType]) -> bool:
    """Return whether the results of a call are adjacent in one buffer."""
    if call.node.op_type != "AllGather" or "cuts" not in call.node.attributes:
        return False
    names = call.node.outputs
    return all(_is_planned(name, types) for name in names) and len({types[name].dtype for name in names}) == 1
