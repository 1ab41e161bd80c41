"""One copy of what a gather makes: who may have it, in which order, and the pages themselves."""

from __future__ import annotations

import importlib.util
import mmap
import os
import threading
from typing import Any

import numpy as np
import pytest
from onnx import helper
from runtime_graphs import comm, make

from gopt.ir.graph import COMM, Node
from gopt.mesh import Mesh
from gopt.runtime.allocator import PAGE, NoAllocator, SharedBuffer
from gopt.runtime.device import Host
from gopt.runtime.engines.base import InProcessStore
from gopt.runtime.engines.shared_buffers import map_shared, probe_peers
from gopt.runtime.executor import Executor
from gopt.runtime.memory import same_memory
from gopt.runtime.partition import Call
from gopt.runtime.session import SessionCache, address_of

mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")
op = helper.make_node
F4 = np.dtype("f4")
SIZE = 2 * 4000
CUTS = [0, SIZE // 2, SIZE]


class Allocator(NoAllocator):
    """Has pages for rank ``member`` of two."""

    def __init__(self, member: int = 0) -> None:
        self.member = member

    def allocate_shared(self, call, count, dtype):
        cuts = call.attributes.get("cuts")
        return SharedBuffer.make(count, dtype, cuts, self.member) if call.op_type == "AllGather" and cuts else None


# --- the order ------------------------------------------------------------------------------------------------------


def program(tmp_path, nodes: list[Any], stage: int, **outputs: Any) -> Executor:
    """x -> gradient; the parameter w, or its shard s, is updated by half of the gradient g."""
    whole, half = ("float32", [SIZE]), ("float32", [SIZE // 2])
    states, replaces = ({"w": whole}, {"w.new": "w"}) if stage < 3 else ({"s": half}, {"s.new": "s"})
    made = {"w.new": whole} if stage < 3 else {"s.new": half}
    graph = make(
        tmp_path, nodes, states | {"x": whole}, made | dict.fromkeys(outputs, whole),
        constants={"zero": np.array([0]), "end": np.array([SIZE // 2]), "stop": np.array([SIZE])},
        values={"y": whole, "z": whole, "n": whole, "m": whole, "p": half, "g": half, "h": half, "s.new": half,
                "f": whole, "b": whole, "v": whole, "q": ("float32", [2, SIZE // 2]),
                **{f"u{i}": half for i in range(10)},
                **dict.fromkeys(("e0", "e1"), ("float32", [0]))},
    )  # fmt: skip
    return Executor(graph, SessionCache(), replaces, Host(Allocator()))


def scatter(name: str, made: str, **more: Any) -> Any:
    return comm("ReduceScatter", [name], [made], reduce="sum", **{"cuts": CUTS, **more})


def gather(name: str, made: str) -> Any:
    return comm("AllGather", [name], [made], cuts=CUTS, shapes=[f"{SIZE}"])


def bounds(found: Executor) -> dict[int, tuple[int, int, tuple[int, ...]]]:
    return {number: (buffer.reads, buffer.writes, buffer.calls) for number, buffer in found.common.items()}


CUT = op("Slice", ["w", "zero", "end"], ["p"])


def update(shard: str) -> list[Any]:
    """Its difference with g, in nodes enough that it is written where the shard lies."""
    nodes = [op("Sub", [shard, "g"], ["u0"]), *(op("Neg", [f"u{i}"], [f"u{i + 1}"]) for i in range(9))]
    return [*nodes, op("Neg", ["u9"], ["s.new"])]


UPDATE = update("p")
DELIVER = gather("s.new", "w.new")
FORWARD, AGAIN = op("Mul", ["x", "w"], ["y"]), op("Mul", ["y", "w"], ["z"])


@pytest.mark.parametrize(
    ("nodes", "outputs", "due"),
    [
        # All reads stand in front of the reduction on which the update waits.
        ([FORWARD, scatter("y", "g"), CUT, *UPDATE, DELIVER], {}, {1: (0, 0, (1,))}),
        # This rank has no part of it, and need not wait for anyone.
        ([FORWARD, scatter("y", "g", cuts=[0, 0, SIZE]), CUT, op("Neg", ["p"], ["s.new"]), DELIVER], {}, {}),
        # One stands behind it: nothing lies between that and the others' writes.
        ([FORWARD, scatter("y", "g"), AGAIN, op("Neg", ["z"], ["n"]), CUT, *UPDATE, DELIVER], {"n"}, {}),
        # But for a second reduction, which the update then waits for although it does not read it,
        ([FORWARD, scatter("y", "g"), AGAIN, scatter("z", "h"), CUT, *UPDATE, DELIVER, gather("h", "n")], {"n"},
         {2: (1, 1, (2,))}),
        # if that is one that nobody leaves before all have come to it.
        ([FORWARD, scatter("y", "g"), AGAIN, comm("Broadcast", ["z"], ["n"], root=0, shapes=[f"{SIZE}"],
                                                  dtype="float32"), CUT, *UPDATE, DELIVER], {"n"}, {}),
        # An update of nothing that was reduced waits for no one.
        ([FORWARD, CUT, op("Neg", ["p"], ["s.new"]), DELIVER, op("Neg", ["y"], ["n"])], {"n"}, {}),
    ],
)  # fmt: skip
def test_a_delivered_state_is_in_common_where_reads_and_writes_are_apart(nodes, outputs, due, tmp_path):
    assert bounds(program(tmp_path, nodes, 2, **dict.fromkeys(outputs))) == due


def test_the_update_waits_for_the_call_that_orders_it(tmp_path):
    """The first reduction's result is there long before the second's, and a rank may still read when it is."""
    nodes = [FORWARD, scatter("y", "g"), AGAIN, scatter("z", "h"), CUT, *UPDATE, DELIVER, gather("h", "n")]
    found = program(tmp_path, nodes, 2, n=None)
    done: list[int] = []

    class Later:
        def __init__(self, index: int, result: list[np.ndarray]) -> None:
            self.index, self.made = index, result

        def result(self) -> list[np.ndarray]:
            done.append(self.index)
            return self.made

    def call(index, node, inputs, buffer=None):
        if node.op_type == "ReduceScatter":
            return Later(index, [inputs[0][: SIZE // 2] * 1])
        if index == 2:
            assert done == [0, 1], "both had ended when the update began"
        made = np.zeros(SIZE, F4) if buffer is None else buffer
        made[: SIZE // 2] = inputs[0]
        return [made]

    w, x = np.ones(SIZE, F4), np.full(SIZE, 3, F4)
    made = found.run({"w": w, "x": x}, call)
    np.testing.assert_array_equal(made["w.new"][: SIZE // 2], np.full(SIZE // 2, -2))


@pytest.mark.parametrize(
    ("more", "due"),
    [
        ([], {0: (2, 2, (0, 1))}),
        # A shard that something else reads last is not written where it lies: it would have to be brought there.
        ([gather("s.new", "v"), op("Neg", ["s"], ["h"]), gather("h", "n")], {}),
        # Gathered values that are read behind the last reduction: who writes next knows nothing of that.
        ([op("Neg", ["b"], ["n"])], {}),
    ],
)
def test_a_shard_lies_where_it_is_gathered(more, due, tmp_path):
    nodes = [
        gather("s", "f"), op("Mul", ["x", "f"], ["y"]), gather("s", "b"), op("Mul", ["y", "b"], ["z"]),
        scatter("z", "g"), *update("s"), *more,
    ]  # fmt: skip
    found = program(tmp_path, nodes, 3, **({"n": None} if more else {}))
    assert {number: each for number, each in bounds(found).items() if number == 0} == due
    buffers = found._assignment
    if not due:
        assert 0 not in buffers.gather_buffers and "s" not in buffers.states and "b" not in buffers.gathered_views
        return
    assert buffers.gather_buffers[0] is found.common[0].memory and buffers.gather_buffers[1] is found.common[0].alias
    assert same_memory(buffers.states["s"], found.common[0].local_shard) and same_memory(
        buffers.gathered_views["b"], buffers.gather_buffers[0]
    )


def test_gathers_that_differ_have_no_common_room(tmp_path):
    """Nor those of which the first is still read when the second fills it again."""
    other = comm("AllGather", ["s"], ["q"], cuts=CUTS, shapes=[f"2,{SIZE // 2}"])
    first, mul = gather("s", "f"), op("Mul", ["x", "f"], ["y"])
    rest = [scatter("y", "g"), *update("s")]
    assert not bounds(program(tmp_path, [first, mul, other, op("Reshape", ["q", "stop"], ["v"]), *rest], 3, v=None))
    alias = [first, gather("s", "b"), mul, op("Neg", ["b"], ["v"]), *rest]
    assert not bounds(program(tmp_path, alias, 3, v=None))


def test_a_shard_that_is_not_in_common_is_written_over_all_the_same(tmp_path):
    """What its gather made has memory of its own, and may be read behind the update."""
    nodes = [gather("s", "f"), op("Mul", ["x", "f"], ["y"]), scatter("y", "g"), *update("s"),
             comm("AllReduce", ["x"], ["v"], reduce="sum"), op("Add", ["f", "v"], ["n"])]  # fmt: skip
    found = program(tmp_path, nodes, 3, n=None)
    assert not bounds(found) and any("s" in step.overwrites for step in found._steps if not isinstance(step, Call))


@pytest.mark.parametrize("stage", [2, 3])
def test_no_reduction_writes_where_states_lie(stage, tmp_path):
    """Ranks may average what was gathered, or what is: MPI does so where it lies, when nobody reads that any more."""
    mean = {"reduce": "mean"}
    third = [gather("s", "f"), comm("AllReduce", ["f"], ["y"], **mean), scatter("y", "g"), *update("s")]
    second = [FORWARD, scatter("y", "g"), CUT, *UPDATE, DELIVER, comm("AllReduce", ["s.new"], ["h"], **mean)]
    found = program(tmp_path, third if stage == 3 else second, stage)
    assert found.common.keys() == {0 if stage == 3 else 1} and found._assignment.donatable == {2 if stage == 3 else 0}


def test_memory_in_which_a_rank_writes_over_what_it_has_of_another_is_not_in_common(tmp_path):
    other = [op("Slice", ["w", "end", "stop"], ["h"]), op("Add", ["h", "g"], ["u0"])]
    nodes = [FORWARD, scatter("y", "g"), *other, *update("")[1:], DELIVER]
    found = program(tmp_path, nodes, 2)
    assert not bounds(found) and any("h" in step.overwrites for step in found._steps if not isinstance(step, Call))


def test_a_reduction_of_nothing_is_no_call_to_which_all_come(tmp_path):
    none = [op("Slice", ["x", "zero", "zero"], ["e0"]), comm("AllReduce", ["e0"], ["e1"], reduce="sum")]
    nodes = [FORWARD, *none, CUT, op("Neg", ["p"], ["s.new"]), DELIVER]
    assert not bounds(program(tmp_path, nodes, 2))


# --- the pages ------------------------------------------------------------------------------------------------------

MESH = Mesh.parse("dp=2,shard=2")


def together(make: Any, mesh: Mesh = MESH) -> list[tuple[dict[Any, SharedBuffer], list[SharedBuffer]]]:
    """Rooms of ranks that are threads, and those that they have in common. ``make(rank)``: the rooms."""
    store, found = InProcessStore(mesh.ranks, 120.0), [None] * mesh.ranks

    def live(rank: int) -> None:
        buffers = make(rank)
        found[rank] = (
            buffers,
            map_shared(buffers, lambda group: mesh.members(group, rank), rank, lambda x: store.gather(rank, x)),
        )

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(mesh.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found)
    return found


def buffers(
    rank: int, reads: int = 1, writes: int = 1, size: int = SIZE, calls: tuple[int, ...] = (0,)
) -> dict[Any, SharedBuffer]:
    """Two rooms of a rank, filled with its number."""
    made = {}
    for place, (group, dtype) in enumerate([("shard", "f4"), ("dp+shard", "f8")]):
        members = MESH.members(group, rank)
        cuts = [size * part // len(members) for part in range(len(members) + 1)]
        plain = SharedBuffer.make(size, np.dtype(dtype), cuts, members.index(rank))
        made[group, place] = SharedBuffer(plain.memory, plain.alias, plain.cuts, plain.member, reads, writes, calls)
        plain.memory[:] = rank
    return made


def test_all_see_what_each_writes_at_the_old_addresses():
    before = {}

    def made(rank):
        found = buffers(rank)
        before[rank] = {key: address_of(buffer.memory) for key, buffer in found.items()}
        return found

    files = set(os.listdir("/proc/self/fd"))
    everyone = together(made)
    assert len(os.listdir("/proc/self/fd")) <= len(files), "the files are closed"
    for rank, (own, packed_view) in enumerate(everyone):
        assert len(packed_view) == 2 and {key: address_of(buffer.memory) for key, buffer in own.items()} == before[rank]
        for (group, _), buffer in own.items():
            members = MESH.members(group, rank)
            assert not before[rank][group, _] % PAGE
            np.testing.assert_array_equal(buffer.memory, np.repeat(members, np.diff(buffer.cuts)))
    for rank, (own, _) in enumerate(everyone):
        own["shard", 0].local_shard[:] = 10 + rank
    for rank, (own, _) in enumerate(everyone):
        due = np.repeat([10 + member for member in MESH.members("shard", rank)], SIZE // 2)
        np.testing.assert_array_equal(own["shard", 0].alias, due)


@pytest.mark.parametrize(
    "change",
    [{"reads": 2}, {"writes": 0}, {"writes": -1}, {"size": SIZE + 4}, {"calls": (0, 3)}],
    ids=lambda each: str(each),
)
def test_one_rank_that_does_not_fit_keeps_its_group_apart(change):
    """Of the ranks 2 and 3 over shard, and of all over both axes."""
    everyone = together(lambda rank: buffers(rank, **(change if rank == 3 else {})))
    assert [len(packed_view) for _, packed_view in everyone] == [1, 1, 0, 0]
    for rank in (2, 3):
        own, _ = everyone[rank]
        assert all((buffer.memory == rank).all() for buffer in own.values())


def _refuse(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def reached() -> list[dict[int, set[int]]]:
    store, found = InProcessStore(4, 120.0), [{}] * 4

    def live(rank: int) -> None:
        found[rank] = probe_peers(rank, lambda item: store.gather(rank, item))

    threads = [threading.Thread(target=live, args=(rank,), name=str(rank)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_whose_pages_a_rank_can_have_is_known_before_rooms_are_made(monkeypatch):
    files = set(os.listdir("/proc/self/fd"))
    assert reached() == [{rank: {0, 1, 2, 3} for rank in range(4)}] * 4
    assert len(os.listdir("/proc/self/fd")) <= len(files), "the files are closed"
    own = os.open

    def refuse(path: Any, *more: Any, **named: Any) -> Any:
        if threading.current_thread().name == "3":
            raise OSError(13, "Permission denied")
        return own(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert reached() == [{0: {0, 1, 2, 3}, 1: {0, 1, 2, 3}, 2: {0, 1, 2, 3}, 3: set()}] * 4


@pytest.mark.parametrize("missing", ["memfd_create", "posix_fallocate", "readlink"])
def test_no_pages_can_be_had_where_the_system_refuses_them(missing, monkeypatch):
    monkeypatch.delattr(os, "memfd_create") if missing == "memfd_create" else monkeypatch.setattr(os, missing, _refuse)
    assert reached() == [{rank: set() for rank in range(4)}] * 4


@mpi
def test_a_gather_of_ranks_that_do_not_reach_the_first_needs_no_room():
    from gopt.runtime.engines.mpi import MpiEngine

    engine = object.__new__(MpiEngine)
    engine.rank, engine._mesh, engine._host_ranks = 1, MESH, range(4)
    call = Node("AllGather", ["s"], ["f"], domain=COMM, attributes={"group": "shard", "cuts": [0, 40000, 80000]})
    engine._reachable = {0: {0}, 1: {0}, 2: set(), 3: set()}
    buffer = engine.allocate_shared(call, 80000, F4)
    assert buffer is not None and buffer.local_shard.size == 40000
    for missing in (0, 1):
        engine._reachable = {0: {0}, 1: {0}} | {missing: {1 - missing}}
        assert (engine.allocate_shared(call, 80000, F4) is None) == (0 not in engine._reachable[missing])


@pytest.mark.parametrize("missing", ["memfd_create", "posix_fallocate", "readlink"])
def test_what_the_system_refuses_leaves_all_apart(missing, monkeypatch):
    monkeypatch.setattr(os, missing, _refuse)
    everyone = together(buffers)
    assert [packed_view for _, packed_view in everyone] == [[]] * 4
    assert all((buffer.memory == rank).all() for rank, (own, _) in enumerate(everyone) for buffer in own.values())


def test_a_kernel_without_huge_pages_has_pages(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # which it does not know
    buffer = SharedBuffer.make(SIZE, F4, CUTS, 1)
    assert buffer.memory.size == SIZE and not buffer.memory.any()


def test_a_rank_without_a_room_leaves_the_others_theirs():
    everyone = together(lambda rank: {} if rank == 0 else buffers(rank))
    assert [len(packed_view) for _, packed_view in everyone] == [0, 0, 1, 1]
