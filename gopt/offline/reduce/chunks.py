"""Delta debugging: items are removed in chunks, each half as long as the chunks before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def remove_chunks(items: Sequence[T], attempt: Callable[[Sequence[T]], bool], alive: Callable[[T], bool]) -> None:
    """Try to remove items, from the last to the first: all of them, then halves, quarters, down to single items.

    ``attempt`` removes a chunk and says whether the result was kept; ``alive`` whether an item is still there, since
    one removal may take others along. ``alive`` is called at most twice for each item at each length of chunks."""
    remaining = list(items)
    size = len(remaining)
    while size and remaining:
        stop = len(remaining)
        while stop > 0:
            chunk = [element for element in remaining[max(0, stop - size) : stop] if alive(element)]
            if chunk and attempt(chunk):
                remaining[max(0, stop - size) : stop] = []
            stop -= size
        remaining = [element for element in remaining if alive(element)]
        size = min(size, len(remaining)) // 2 if size > 1 else 0
