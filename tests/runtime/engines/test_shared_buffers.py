"""Shared buffers: what all members of a group are granted, or none, and the memory itself."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gopt.ir.graph import COMM, Node
from gopt.records.mesh import Mesh
from gopt.runtime.engines.base import InProcessStore
from gopt.runtime.engines.shared_buffers import PAGE, MemoryFile, open_handle, share_buffers
from gopt.runtime.host_value import address_of
from gopt.runtime.memory import packed_view
from gopt.runtime.shared_memory import (
    NOT_SHARED,
    GatherRequest,
    SendRequest,
    SharedMemory,
)

mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")
op = helper.make_node
F4 = np.dtype("f4")
SIZE = 2 * 4000
CUTS = [0, SIZE // 2, SIZE]


# --- the pages ------------------------------------------------------------------------------------------------------

MESH = Mesh.parse("dp=2,shard=2")


def requests(
    rank: int, reads: int = 1, writes: int = 1, size: int = SIZE, calls: tuple[int, ...] = (0,)
) -> dict[Any, GatherRequest]:
    """Two gathers of a rank."""
    made = {}
    for number, (group, dtype) in enumerate([("shard", "f4"), ("dp+shard", "f8")]):
        count = len(MESH.members(group, rank))
        cuts = [size * part // count for part in range(count + 1)]
        call = Node("AllGather", ["s"], ["f"], domain=COMM, attributes={"group": group, "cuts": cuts})
        made[group, number] = GatherRequest(call, size, np.dtype(dtype), calls, reads, writes)
    return made


def sent(rank: int, size: int = SIZE) -> dict[Any, SendRequest]:
    """A reduction over each axis."""
    call = Node("AllReduce", ["s"], ["f"], domain=COMM, attributes={})
    return {(group, 7): SendRequest(call, size, F4) for group in ("dp", "shard")}


def together(gathers: Any = requests, sends: Any = lambda rank: {}) -> list[SharedMemory]:
    """What ranks that are threads agree on; both take the rank."""
    store, found = InProcessStore(MESH.ranks, 120.0), [NOT_SHARED] * MESH.ranks

    def live(rank: int) -> None:
        found[rank] = share_buffers(
            sends(rank), gathers(rank), lambda group: MESH.members(group, rank), rank,
            lambda item: store.gather(rank, item),
        )  # fmt: skip

    threads = [threading.Thread(target=live, args=(rank,), name=str(rank)) for rank in range(MESH.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_members_see_what_each_writes():
    files = set(os.listdir("/proc/self/fd"))
    everyone = together()
    assert [len(shared.gathers) for shared in everyone] == [2] * 4
    for rank, shared in enumerate(everyone):
        for buffer in shared.gathers.values():
            assert not address_of(buffer.memory) % PAGE and buffer.memory.size == SIZE
            buffer.local_shard[:] = 10 + rank
    for rank, shared in enumerate(everyone):
        for (group, _), buffer in shared.gathers.items():
            due = np.repeat([10 + member for member in MESH.members(group, rank)], np.diff(buffer.cuts))
            np.testing.assert_array_equal(buffer.memory, due)
    del everyone, shared, buffer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= len(files), "the files are closed"


def test_each_member_reads_what_the_others_send():
    everyone = together(lambda rank: {}, sent)
    for rank, shared in enumerate(everyone):
        for buffer in shared.sends.values():
            assert buffer.memory.base is not None and not address_of(buffer.memory) % 64
            buffer.memory[:] = rank
    for rank, shared in enumerate(everyone):
        for (group, _), buffer in shared.sends.items():
            members = MESH.members(group, rank)
            assert [part[0] for part in buffer.parts] == [*members] and buffer.parts[
                members.index(rank)
            ] is buffer.memory
            assert [part.flags.writeable for part in buffer.parts] == [member == rank for member in members]
            assert packed_view([buffer.memory[:100].reshape(10, 10), buffer.memory[100:]]).size == SIZE


def test_buffers_of_one_file_lie_apart():
    shared = together(
        lambda rank: {}, lambda rank: {("dp", n): SendRequest(sent(0)["dp", 7].call, 5, F4) for n in range(3)}
    )[0]
    for number, buffer in enumerate(shared.sends.values()):
        buffer.memory[:] = number
    assert [buffer.memory.tolist() for buffer in shared.sends.values()] == [[number] * 5 for number in range(3)]


@pytest.mark.parametrize(
    "change",
    [{"reads": 2}, {"writes": 0}, {"writes": -1}, {"size": SIZE + 4}, {"calls": (0, 3)}],
    ids=lambda each: str(each),
)
def test_one_rank_that_does_not_fit_keeps_its_group_apart(change):
    """Of the ranks 2 and 3 over shard, and of all over both axes."""
    everyone = together(lambda rank: requests(rank, **(change if rank == 3 else {})))
    assert [len(shared.gathers) for shared in everyone] == [1, 1, 0, 0]


def test_a_rank_without_a_request_leaves_the_others_theirs():
    everyone = together(lambda rank: {} if rank == 0 else requests(rank), lambda rank: {} if rank == 0 else sent(rank))
    assert [len(shared.gathers) for shared in everyone] == [0, 0, 1, 1]
    assert [sorted(shared.sends) for shared in everyone] == [[], [("dp", 7)], [("shard", 7)], [("dp", 7), ("shard", 7)]]


def _refuse(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("missing", ["memfd_create", "posix_fallocate", "readlink", "absent"])
def test_what_the_system_refuses_leaves_all_apart(missing, monkeypatch):
    files = set(os.listdir("/proc/self/fd"))
    if missing == "absent":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, missing, _refuse)
    assert together(requests, sent) == [NOT_SHARED] * 4
    assert len(os.listdir("/proc/self/fd")) <= len(files)


def test_a_rank_that_reaches_no_file_keeps_its_groups_apart(monkeypatch):
    own = os.open

    def refuse(path: Any, *more: Any, **named: Any) -> Any:
        if threading.current_thread().name == "3":
            raise OSError(13, "Permission denied")
        return own(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    everyone = together(requests, sent)
    assert [(sorted(shared.gathers), sorted(shared.sends)) for shared in everyone] == [
        ([("shard", 0)], [("dp", 7), ("shard", 7)]), ([("shard", 0)], [("shard", 7)]), ([], [("dp", 7)]), ([], []),
    ]  # fmt: skip


def test_another_file_of_that_number_is_not_opened():
    """As where processes are numbered twice on a host."""
    first, second = MemoryFile(sent(0)), MemoryFile(sent(1))
    try:
        opened = open_handle(first.handle, os.O_RDONLY)
        assert opened is not None
        os.close(opened)
        assert open_handle(replace(first.handle, name=second.handle.name), os.O_RDONLY) is None
    finally:
        first.close()
        second.close()


@mpi
@pytest.mark.parametrize(
    ("op_type", "group", "count", "hosts", "due"),
    [
        ("AllReduce", "shard", 1 << 14, range(4), True),
        ("ReduceScatter", "shard", 1 << 14, range(4), True),
        ("Reduce", "shard", 1 << 14, range(4), False),  # only its root has a result
        ("AllReduce", "shard", (1 << 14) - 1, range(4), False),  # too small to pay
        ("AllReduce", "shard", 1 << 14, [0, 2], False),  # a member on another host
    ],
)
def test_which_calls_an_engine_shares(op_type, group, count, hosts, due):
    from gopt.runtime.engines.mpi import MpiEngine

    engine = object.__new__(MpiEngine)
    engine.rank, engine._mesh, engine._host_ranks = 0, MESH, list(hosts)
    call = Node(op_type, ["s"], ["f"], domain=COMM, attributes={"group": group, "cuts": [0, 4, 8]})
    assert engine._is_shared_send(SendRequest(call, count, F4)) == due
