"""Buffers in memory shared by the ranks of one host: all ranks agree which, and map them.

A reduction reads the inputs of the other ranks in place. A gather needs no copy: each member writes its shard into one
buffer read by all members. The memory is an unnamed file (memfd): nothing stays behind when a rank ends, and the size
of /dev/shm, small in containers, is no limit. The pages are allocated in advance, so that no later write fails for lack
of memory. Ranks open each other's files through /proc. After any failure, the whole group uses MPI."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gopt.runtime.exchanged_values import exchanged
from gopt.runtime.session import Array
from gopt.runtime.shared_memory import GatherRequest, Key, SendRequest, SharedGather, SharedMemory, SharedSend

PAGE = mmap.ALLOCATIONGRANULARITY

Gather: TypeAlias = Callable[[Any], list[Any]]
"""Item of this rank -> the items of all ranks, in rank order."""
Members: TypeAlias = Callable[[str], Sequence[int]]
"""Group -> its ranks in order, this rank among them."""
Request: TypeAlias = SendRequest | GatherRequest
Source: TypeAlias = tuple[int, int]
"""A rank, and which of its files: 0 for sends, 1 for gathers."""


@exchanged
@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """How another rank of the host opens a file. ``starts``: buffer -> the offset of the first byte in the file."""

    process: int
    file: int
    name: str
    size: int
    starts: dict[Key, int]


class MemoryFile:
    """A memory file with space for some buffers, each at the beginning of a page."""

    def __init__(self, requests: Mapping[Key, Request]) -> None:
        """Allocate the file. Raises OSError or AttributeError where the system has no memory files."""
        starts, size = {}, 0
        for key, request in requests.items():
            starts[key] = size
            size += -(-request.count * request.dtype.itemsize // PAGE) * PAGE
        name = f"gopt-{secrets.token_hex(8)}"
        self.file = os.memfd_create(name)
        self.handle = MemoryHandle(os.getpid(), self.file, name, size, starts)
        try:
            os.posix_fallocate(self.file, 0, size)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. The memory exists as long as a process maps the file."""
        os.close(self.file)


def share_buffers(
    sends: Mapping[Key, SendRequest], gathers: Mapping[Key, GatherRequest], members: Members, rank: int,
    exchange: Gather,
) -> SharedMemory:  # fmt: skip
    """Agree on shared buffers and map them. All ranks call this function together, before they compile. New memory is
    zero.

    A request is granted to all members of its group or to no member. All members must ask for the same size and type,
    gathers must read and write in a safe order, and every member must be able to open the memory of the others."""
    requests: dict[Key, Request] = {**sends, **gathers}
    kinds = exchange({key: _kind(request) for key, request in requests.items()})
    alike = {key for key in (*sends, *gathers) if len({kinds[member].get(key) for member in members(key[0])}) == 1}
    orders = exchange({key: (request.reads, request.writes) for key, request in gathers.items()})
    safe = {key for key in gathers if key in alike and _is_ordered([orders[member][key] for member in members(key[0])])}
    sends = {key: request for key, request in sends.items() if key in alike}
    gathers = {key: request for key, request in gathers.items() if key in safe}
    led = {key: request for key, request in gathers.items() if members(key[0])[0] == rank}
    local = [_make_file(sends), _make_file(led)]
    try:
        handles: list[list[MemoryHandle | None]] = exchange([None if file is None else file.handle for file in local])
        # Of a send every member has its own memory; of a gather the first member has it for all.
        needed = {key: [(member, 0) for member in members(key[0])] for key in sends}
        needed |= {key: [(members(key[0])[0], 1)] for key in gathers}
        files = {
            source: _map(handles[source[0]][source[1]], writable=source[1] == 1 or source[0] == rank)
            for source in {source for sources in needed.values() for source in sources}
        }
        mine = {
            key
            for key, sources in needed.items()
            if all(_has(files[source], handles, source, key) for source in sources)
        }
        granted: list[set[Key]] = exchange(mine)
    finally:
        for file in local:
            if file is not None:
                file.close()
    found_sends, found_gathers = {}, {}
    for key in (key for key in mine if all(key in granted[member] for member in members(key[0]))):
        views = [_view(files[source], handles, source, key, requests[key]) for source in needed[key]]
        position = list(members(key[0])).index(rank)
        if key in sends:
            found_sends[key] = SharedSend(views[position], views)
        else:
            cuts = gathers[key].call.attributes["cuts"]
            found_gathers[key] = SharedGather(views[0], cuts, position, len(gathers[key].calls))
    return SharedMemory(found_sends, found_gathers)


def _kind(request: Request) -> tuple[Any, ...]:
    """The part of a request that must be equal on all members."""
    calls = request.calls if isinstance(request, GatherRequest) else ()
    return request.call.op_type, request.count, request.dtype.name, calls


def _is_ordered(orders: Sequence[tuple[int, int]]) -> bool:
    """Return whether all members have read before any member writes."""
    return max(reads for reads, _ in orders) <= min(writes for _, writes in orders)


def _make_file(requests: Mapping[Key, Request]) -> MemoryFile | None:
    try:
        return MemoryFile(requests) if requests else None
    except (AttributeError, OSError):  # not on this system; not enough memory, or files
        return None


def open_handle(handle: MemoryHandle, flags: int) -> int | None:
    """Open the file of another rank; None after a failure, and for a number that now belongs to another file."""
    path = f"/proc/{handle.process}/fd/{handle.file}"
    try:
        return os.open(path, flags) if os.readlink(path).startswith(f"/memfd:{handle.name}") else None
    except OSError:
        return None


def _map(handle: MemoryHandle | None, writable: bool) -> Array | None:
    """The bytes of a file; None if mapping fails."""
    file = None if handle is None else open_handle(handle, os.O_RDWR if writable else os.O_RDONLY)
    if handle is None or file is None:
        return None
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(file, handle.size, access=access), np.uint8)
    except OSError:
        return None
    finally:
        os.close(file)


def _has(file: Array | None, handles: Sequence[Sequence[MemoryHandle | None]], source: Source, key: Key) -> bool:
    handle = handles[source[0]][source[1]]
    return file is not None and handle is not None and key in handle.starts


def _view(
    file: Array | None, handles: Sequence[Sequence[MemoryHandle | None]], source: Source, key: Key,
    request: Request,
) -> Array:  # fmt: skip
    handle = handles[source[0]][source[1]]
    assert file is not None and handle is not None
    start = handle.starts[key]
    view: Array = file[start : start + request.count * request.dtype.itemsize].view(request.dtype)
    return view
