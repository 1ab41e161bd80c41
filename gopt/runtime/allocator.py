"""Memory that an engine lends to a program, because its calls are cheaper there."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from gopt.ir.graph import Node
from gopt.runtime.session import Array

PAGE = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """What a gather makes, flat, and which of its elements this rank writes: of ``cuts`` its place among the members.
    ``memory`` begins a page, and no other array lies in its pages.

    ``reads``: the number, among the calls of its group, of the first behind all reads of the last step's values;
    ``writes``: of the last call that all ranks have come to when this one writes. ``calls``: the numbers, likewise, of
    the gathers of a step that make the same: the first has ``memory`` as its room, the others ``again``, which is that.
    """

    memory: Array
    alias: Array
    cuts: Sequence[int]
    member: int
    reads: int = 0
    writes: int = -1
    calls: tuple[int, ...] = ()

    @classmethod
    def make(cls, count: int, dtype: np.dtype[Any], cuts: Sequence[int], member: int) -> SharedBuffer:
        """In pages of its own, with zeros."""
        size = count * dtype.itemsize
        pages = mmap.mmap(-1, whole_pages(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(AttributeError, OSError):  # not on this system; a kernel that has none
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)[:size].view(dtype)
        return cls(memory, memory[:], tuple(cuts), member)

    @property
    def local_shard(self) -> Array:
        return self.memory[self.cuts[self.member] : self.cuts[self.member + 1]]

    def owns(self, start: int, stop: int) -> bool:
        """Whether these elements are all this rank's own."""
        return self.cuts[self.member] <= start and stop <= self.cuts[self.member + 1]


class Allocator(Protocol):
    """Who has memory in which calls are cheaper than in any other, where that is so; flat, of so many elements."""

    def allocate(self, call: Node, count: int, dtype: np.dtype[Any]) -> Array | None:
        """For what a reduction sends."""

    def allocate_shared(self, call: Node, count: int, dtype: np.dtype[Any]) -> SharedBuffer | None:
        """For what a gather makes, which may become the same memory on all ranks."""


class NoAllocator:
    """Lends nothing."""

    def allocate(self, call: Node, count: int, dtype: np.dtype[Any]) -> None:
        return None

    def allocate_shared(self, call: Node, count: int, dtype: np.dtype[Any]) -> None:
        return None


NO_ALLOCATOR = NoAllocator()


def whole_pages(size: int) -> int:
    """The bytes of the pages that so many bytes take."""
    return -(-size // PAGE) * PAGE
