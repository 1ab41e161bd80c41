"""Checks, before a graph runs, that its values fit into the free memory of this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

from gopt.errors import RunError
from gopt.ir.external_data import show
from gopt.ir.graph import Graph
from gopt.ir.types import TensorType
from gopt.text.amounts import format_bytes

_FEW = 1 << 26
"""Bytes that fit into any memory."""
_MEMORY = "run it where more memory is free"


def free_memory() -> int:
    """Bytes of memory that a program can allocate without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(graph: Graph, states: Iterable[str], copies: int) -> None:
    """Raise RunError where a value of the graph, or ``copies`` copies of all states, are larger than the free
    memory."""
    free = free_memory()
    name, kind = max(graph.types.items(), key=lambda item: item[1].nbytes)
    if kind.nbytes > free:
        raise RunError(
            f"value {show(name)} is {kind}, {format_bytes(kind.nbytes)}, and {format_bytes(free)} of memory are free",
            _MEMORY,
        )
    needed = copies * sum(graph.type_of(state).nbytes for state in states)
    if needed > free:
        raise RunError(
            f"{copies} copies of all states take {format_bytes(needed)}, and {format_bytes(free)} of memory are free",
            _MEMORY,
        )


def check_elements(shape: Sequence[int], members: int) -> None:
    """Raise MemoryError where exact arithmetic on a value of ``members`` members takes more than the free memory: ten
    arrays of words."""
    needed = 80 * members * prod(shape)
    if needed > _FEW and needed > free_memory():
        raise MemoryError(f"{list(shape)} on {members} members takes {format_bytes(needed)}")


def check_batches_fit(types: Mapping[str, TensorType], inputs: Collection[str], batches: int) -> None:
    """Raise RunError where ``batches`` batches of the inputs, with the largest value in float64 and its gradient, are
    larger than the free memory: a check by numbers holds more."""
    sized = {name: kind for name, kind in types.items() if kind.static}
    if not sized:
        return
    name, kind = max(sized.items(), key=lambda item: item[1].elements)
    needed = batches * sum(sized[name].nbytes for name in inputs if name in sized) + 2 * 8 * kind.elements
    if needed > (free := free_memory()):
        raise RunError(
            f"value {show(name)} is {kind}: a check of gradients takes at least {format_bytes(needed)} of memory, and "
            f"{format_bytes(free)} are free",
            "give smaller sizes with --dim: the step is checked at the size that it has",
        )
