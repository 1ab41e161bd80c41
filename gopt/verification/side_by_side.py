"""Runs of one program on several inputs, side by side: each is one thread's work, and other cores would be idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from gopt.system.background import usable_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

ABREAST = 2
"""Runs at a time, at most: each has memory for a run's values."""


def side_by_side(work: Callable[[Item], Result], items: Iterable[Item], abreast: int = ABREAST) -> list[Result]:
    """The results of ``work`` in the order of the items; raises the error of the first item that failed."""
    due = list(items)
    threads = min(len(due), abreast, usable_cores())
    if threads < 2:
        return list(map(work, due))
    with ThreadPoolExecutor(threads) as pool:
        # As in this thread: what NumPy says of overflows is known to the context.
        return [run.result() for run in [pool.submit(copy_context().run, work, item) for item in due]]
