"""Delta debugging: what can be removed is removed in chunks, of which each is half as long as those before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def remove_chunks(items: Sequence[T], attempt: Callable[[Sequence[T]], bool], alive: Callable[[T], bool]) -> None:
    """Try to remove items, from the last to the first: all of them, then halves, quarters, down to single ones.

    ``attempt`` removes a chunk and says whether that was kept; ``alive`` whether an item is still there, since one
    removal may take others along. It is asked at most twice for each item, and for each length of chunks.
    """
    left = list(items)
    size = len(left)
    while size and left:
        stop = len(left)
        while stop > 0:
            chunk = [each for each in left[max(0, stop - size) : stop] if alive(each)]
            if chunk and attempt(chunk):
                left[max(0, stop - size) : stop] = []
            stop -= size
        left = [each for each in left if alive(each)]
        size = min(size, len(left)) // 2 if size > 1 else 0
