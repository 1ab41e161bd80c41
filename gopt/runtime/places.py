"""Where the results of a program lie, step after step: found once, so that no step asks for memory or binds it anew.

What one call sends together lies in the call's buffer. What outlives a step has two places that take turns: one may
still be read while the other is written. All else shares: a place is free for another result of its size when the last
step that reads it is done. What a call reads shares with nobody, for the call may run beside the steps that follow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from gopt.graph.types import TensorType
from gopt.runtime.draws import numpy_dtype
from gopt.runtime.memory import aligned
from gopt.runtime.session import Array, Value

Places: TypeAlias = Mapping[str, Sequence[Value]]
"""Result -> its place, or the two that take turns; without those whose shape or type leaves it to the runtime."""

_PLAIN = frozenset({
    "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
})  # fmt: skip
"""Types that NumPy has of its own."""


class Step(Protocol):
    """What reads and makes values."""

    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...


def find_places(
    steps: Sequence[Step], dead: Sequence[Sequence[str]], left_out: Collection[str], types: Mapping[str, TensorType],
    sent: Mapping[str, Array], kept: Collection[str], waited: Collection[str],
) -> dict[str, list[Value]]:  # fmt: skip
    """Places for what these steps make, in this order; ``dead``: for every step, what nobody reads after it. Linear.

    ``left_out``: results that lie elsewhere; ``sent``: those that lie in a buffer already; ``kept``: those that
    outlive a step; ``waited``: those that calls read.
    """
    found = {name: [Value(place, lasting=True)] for name, place in sent.items()}
    memory: dict[str, Array] = {}
    free: dict[int, list[Array]] = {}
    for step, gone in zip(steps, dead, strict=True):
        for name in step.outputs:
            type = types.get(name)
            if name in found or name in left_out or type is None or not type.elements or type.dtype not in _PLAIN:
                continue
            dtype = numpy_dtype(type.dtype)
            if name in kept:
                found[name] = [Value(aligned(type.dims, dtype), lasting=True) for _ in range(2)]
                continue
            again = free.get(type.nbytes)
            memory[name] = again.pop() if again else aligned([type.nbytes], np.dtype(np.uint8))
            found[name] = [Value(memory[name].view(dtype).reshape(type.dims), lasting=True)]
        for name in gone:
            if name in memory and name not in waited:
                free.setdefault(memory[name].nbytes, []).append(memory.pop(name))
    return found
