"""Checks, before a graph runs, that what it computes fits into the free memory of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable

from gopt.errors import RunError
from gopt.ir.external_data import show
from gopt.ir.graph import Graph


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
    """Raise RunError where one value of the graph, or ``copies`` copies of all states, are larger than the free
    memory."""
    free = free_memory()
    name, kind = max(graph.types.items(), key=lambda item: item[1].nbytes)
    if kind.nbytes > free:
        raise RunError(f"value {show(name)} is {kind}, {kind.nbytes} bytes, and {free} bytes of memory are free")
    held = copies * sum(graph.type_of(state).nbytes for state in states)
    if held > free:
        raise RunError(f"{copies} copies of all states take {held} bytes, and {free} bytes of memory are free")
