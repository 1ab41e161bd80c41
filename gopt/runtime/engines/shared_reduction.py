"""Memory that ranks of one host share, and reductions in it: each rank adds up its slice where the others wrote theirs.

A rank's file has no name in any folder (memfd), so nothing is left behind however the rank ends, and the limit of
/dev/shm, small in containers, does not hold for it. The pages of a room are there before it is lent, so that no write
can fail. Once plans were found equal, the others map the file to be read, by its number in the rank's process. Where
any of that is refused, a room is a rank's own memory like any other, and the whole group leaves the call to MPI.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from gopt.collectives.layout import HALVES, flat_cuts
from gopt.collectives.reference import COMBINE
from gopt.runtime.allocator import whole_pages
from gopt.runtime.session import Array

MIN_BYTES = 1 << 16
"""Bytes of a call from which it gains: below, the waits cost more than what MPI copies."""
CHUNK = 1 << 30
"""Bytes of addresses that are mapped at once, which take no memory: a mapping keeps a file open, and those are few."""
TILE = 1 << 16
"""Elements that are combined at once: they stay in the cache from the first part to the last."""

Key: TypeAlias = tuple[str, int]
"""A group, and the number of a call among those of the group."""


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """What the others need to map a rank's file. ``rooms``: call -> first byte, elements, type."""

    process: int
    file: int
    name: str
    buffers: dict[Key, tuple[int, int, str]]


class Arena:
    """Memory of this rank that the others of its host may read."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._name = f"gopt-{secrets.token_hex(8)}"
        self._memory = np.empty(0, np.uint8)
        self._begin = self._end = 0
        """First byte in the file of what is mapped, and of what is not lent."""
        self._lent: dict[int, int] = {}
        """Id of a room -> its first byte in the file."""

    def allocate(self, count: int, dtype: np.dtype[Any]) -> Array | None:
        """A flat array with values of no meaning, or None where this system has none to give."""
        size = count * dtype.itemsize
        pages = whole_pages(size)
        try:
            if self._file is None:
                self._file = os.memfd_create(self._name)
            limit = self._begin + self._memory.size
            if self._end + pages > limit:
                chunk = max(CHUNK, pages)
                os.ftruncate(self._file, limit + chunk)
                self._memory = np.frombuffer(mmap.mmap(self._file, chunk, offset=limit), np.uint8)
                self._begin = self._end = limit
            os.posix_fallocate(self._file, self._end, pages)
        except (AttributeError, OSError):  # not on this system; not enough memory, or files
            return None
        buffer: Array = self._memory[self._end - self._begin :][:size].view(dtype)
        self._lent[id(buffer)] = self._end
        self._end += pages
        return buffer

    def map_buffers(
        self, buffers: Mapping[Key, Array], members: Callable[[str], Sequence[int]], rank: int,
        gather: Callable[[Any], list[Any]],
    ) -> dict[int, list[Array]]:  # fmt: skip
        """Let the others see ``rooms``, and see theirs; all ranks together. Nothing can be taken afterwards.

        ``members``: group -> its ranks, ``rank`` among them; ``gather``: what every rank gives. Returns the id of a
        room -> the rooms of all members, in their order, the others' read-only: only where every member sees all.
        """
        handles: list[MemoryHandle | None] = gather(self._make_handle(buffers))
        mine = handles[rank]
        alike = {} if mine is None else {
            key: members(key[0]) for key, (_, *kind) in mine.buffers.items()
            if all(_kind(handles[other], key) == kind for other in members(key[0]))
        }  # fmt: skip
        files = {other: _map(handles[other]) for other in {each for ranks in alike.values() for each in ranks} - {rank}}
        seen = {key for key, ranks in alike.items() if all(files.get(other, ()) is not None for other in ranks)}
        everyone: list[set[Key]] = gather(seen)
        if self._file is not None:
            os.close(self._file)  # whoever has mapped it keeps the memory
            self._file = None
        found = {}
        for key, ranks in alike.items():
            if all(key in everyone[other] for other in ranks):
                parts = [buffers[key] if each == rank else _part(files[each], handles[each], key, buffers[key].dtype)
                         for each in ranks]  # fmt: skip
                found[id(buffers[key])] = parts
        return found

    def _make_handle(self, buffers: Mapping[Key, Array]) -> MemoryHandle | None:
        if self._file is None:
            return None
        places = {key: (self._lent[id(buffer)], buffer.size, buffer.dtype.name) for key, buffer in buffers.items()}
        return MemoryHandle(os.getpid(), self._file, self._name, places)


def _kind(handle: MemoryHandle | None, key: Key) -> list[Any] | None:
    """Elements and type of a room, where it is offered."""
    return None if handle is None or key not in handle.buffers else list(handle.buffers[key][1:])


def open_handle(handle: MemoryHandle | None, flags: int) -> int | None:
    """A file of another rank; None where there is none, it cannot be reached, or another one is found there."""
    if handle is None:
        return None
    path = f"/proc/{handle.process}/fd/{handle.file}"
    try:
        return os.open(path, flags) if os.readlink(path).startswith(f"/memfd:{handle.name}") else None
    except OSError:
        return None


def _map(handle: MemoryHandle | None) -> Array | None:
    """A file of another rank, to be read; None where that cannot be."""
    file = open_handle(handle, os.O_RDONLY)
    if file is None:
        return None
    try:
        return np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError:
        return None
    finally:
        os.close(file)


def _part(file: Array | None, handle: MemoryHandle | None, key: Key, dtype: np.dtype[Any]) -> Array:
    assert file is not None and handle is not None
    start, count, _ = handle.buffers[key]
    part: Array = file[start : start + count * dtype.itemsize].view(dtype)
    return part


# --- reductions -----------------------------------------------------------------------------------------------------


def reduce_scatter(
    parts: Sequence[Array], place: int, cuts: Sequence[int], how: str, wait: Callable[[], None]
) -> Array:
    """Elements ``cuts[place]`` to ``cuts[place + 1]`` combined over the members: that slice of the member's own part.

    ``wait`` returns when all members have come to it: at first all have written, at last all have read, so that each
    may write its part again. ``how``: sum, mean, max or min.
    """
    wait()
    mine = parts[place][cuts[place] : cuts[place + 1]]
    _combine([part[cuts[place] : cuts[place + 1]] for part in parts], how, mine)
    wait()
    return mine


def all_reduce(parts: Sequence[Array], place: int, how: str, wait: Callable[[], None]) -> Array:
    """All elements combined over the members, as the member's own part; ``wait`` as for ``reduce_scatter``."""
    cuts = flat_cuts(parts[place].size, len(parts))
    reduce_scatter(parts, place, cuts, how, wait)
    for part, (start, stop) in zip(parts, pairwise(cuts)):
        if part is not parts[place]:
            parts[place][start:stop] = part[start:stop]
    wait()
    return parts[place]


def _combine(parts: Sequence[Array], how: str, into: Array) -> None:
    """Parts combined from first to last, with the bits of the reference; ``into`` may be one of them."""
    combine, half = COMBINE[how], into.dtype.name in HALVES
    scratch = np.empty(min(TILE, into.size), np.float32 if half else into.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, into.size, TILE):
            first, *others = (part[start : start + TILE] for part in parts)
            target = into[start : start + TILE]
            total = first.astype(np.float32) if half else first
            for number, other in enumerate(others, 1):
                # The last goes where it belongs; before it, that may still have to be read.
                out = target if number == len(others) and not half else scratch[: target.size]
                total = combine(total, other, out=out)
            if how == "mean":
                np.divide(total, len(parts), out=total)
            if half:
                target[:] = total.astype(target.dtype)
