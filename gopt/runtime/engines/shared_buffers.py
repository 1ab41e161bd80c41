"""One copy of what a gather makes, for all ranks of a host: each writes its own part where all the others read it.

A rank makes room for the whole in pages of its own. Once plans were found equal, the first of the group gives pages to
all, and each puts them in the place of its own, at the addresses that its sessions are bound to. From then on a gather
is a wait: when all have come, all have written.

A rank may write its part of the next values only when nobody reads the last ones any more: that is known before the
first step (``gopt.runtime.planner.hazards``). Where it is not so, or where memory is refused, each rank keeps its own
copy and MPI fills it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gopt.runtime.allocator import PAGE, SharedBuffer, whole_pages
from gopt.runtime.engines.shared_reduction import Key, MemoryHandle, open_handle
from gopt.runtime.session import Array, address_of


def probe_peers(rank: int, gather: Callable[[Any], list[Any]]) -> dict[int, set[int]]:
    """Whose pages each rank of this host can have in the place of its own: itself too, where this system has any. All
    its ranks together, before they lay out what they gather: where layers are gathered one by one, a room that stays
    and that MPI has to fill takes more memory than none."""
    file = _memory(PAGE)
    handles: dict[int, MemoryHandle | None] = dict(
        gather((rank, None if file is None else MemoryHandle(os.getpid(), *file, {})))
    )
    seen: set[int] = set()
    for other, handle in handles.items():
        opened = open_handle(handle, os.O_RDWR)
        if opened is not None:
            os.close(opened)
            seen.add(other)
    found = dict(gather((rank, seen)))
    if file is not None:
        os.close(file[0])
    return found


def map_shared(
    buffers: Mapping[Key, SharedBuffer],
    members: Callable[[str], Sequence[int]],
    rank: int,
    gather: Callable[[Any], list[Any]],
) -> list[SharedBuffer]:
    """Put the same pages in the place of the rooms of all members; all ranks together, between steps.

    ``members``: group -> its ranks, ``rank`` among them; ``gather``: what every rank gives. Returns the rooms that all
    members now have in common: their values are what each had as its own part.
    """
    told = gather(
        {key: (buffer.memory.nbytes, buffer.calls, buffer.reads, buffer.writes) for key, buffer in buffers.items()}
    )
    groups = {key: members(key[0]) for key in buffers}
    fit = {key: ranks for key, ranks in groups.items() if _fit([told[other].get(key) for other in ranks])}
    file = _make_handle(buffers, [key for key, ranks in fit.items() if ranks[0] == rank])
    handles: list[MemoryHandle | None] = gather(file)
    leaders = {ranks[0] for ranks in fit.values()}
    files = {leader: open_handle(handles[leader], os.O_RDWR) for leader in leaders}
    everyone: list[set[Key]] = gather({key for key, ranks in fit.items() if files[ranks[0]] is not None})
    found = []
    for key, ranks in fit.items():
        source, handle = files[ranks[0]], handles[ranks[0]]
        if source is not None and handle is not None and all(key in everyone[other] for other in ranks):
            buffer = buffers[key]
            local_shard = buffer.local_shard.copy()
            _replace_pages(buffer.memory, source, handle.buffers[key][0])
            np.copyto(buffer.local_shard, local_shard)
            found.append(buffer)
    gather(None)  # all have opened the files, and written
    for source in (*files.values(), None if file is None else file.file):
        if source is not None:
            os.close(source)
    return found


def _fit(told: Sequence[tuple[int, tuple[int, ...], int, int] | None]) -> bool:
    """Whether the members have rooms of one size for the same gathers, and whoever writes has met all that read."""
    known = [each for each in told if each is not None]
    kinds = {(size, calls) for size, calls, _, _ in known}
    if len(known) < len(told) or len(kinds) > 1:
        return False
    return max(reads for *_, reads, _ in known) <= min(writes for *_, writes in known)


def _make_handle(buffers: Mapping[Key, SharedBuffer], keys: Sequence[Key]) -> MemoryHandle | None:
    """A file with pages for these rooms; None where there is nothing to offer."""
    if not keys:
        return None
    places, size = {}, 0
    for key in keys:
        memory = buffers[key].memory
        places[key] = size, memory.size, memory.dtype.name
        size += whole_pages(memory.nbytes)
    file = _memory(size)
    return None if file is None else MemoryHandle(os.getpid(), *file, places)


def _memory(size: int) -> tuple[int, str] | None:
    """A file without a place in any folder, with this many bytes, and its name; None where there is none to be had."""
    name = f"gopt-{secrets.token_hex(8)}"
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not on this system; not enough files
        return None
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        os.close(file)
        return None
    return file, name


def _replace_pages(memory: Array, file: int, start: int) -> None:
    """Map a file, from its byte ``start`` on, where an array lies; raises OSError. NumPy and sessions see no change of
    address, and whoever frees the array frees the mapping."""
    writable, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    address, size = address_of(memory), whole_pages(memory.nbytes)
    if _libc().mmap(address, size, writable, fixed, file, start) != address:
        raise OSError(ctypes.get_errno(), "pages that ranks share cannot be mapped")


_MAP_FIXED = 0x10
"""Of Linux, which alone has memfd_create; Python does not know it."""


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return libc
