"""One copy of what a gather makes: who may have it, in which order, and the pages themselves."""

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
from runtime_graphs import comm, make

from gopt.ir.graph import COMM, Node
from gopt.mesh import Mesh
from gopt.runtime.engines.base import InProcessStore
from gopt.runtime.engines.shared_buffers import PAGE, MemoryFile, open_handle, share_buffers
from gopt.runtime.execution_plan import ExecutionPlan, plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.memory import packed_view, same_memory
from gopt.runtime.planner.buffers import allocate_buffers
from gopt.runtime.session import SessionCache, address_of
from gopt.runtime.shared_memory import (
    NOT_SHARED,
    GatherRequest,
    SendRequest,
    SharedGather,
    SharedMemory,
)

mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")
op = helper.make_node
F4 = np.dtype("f4")
SIZE = 2 * 4000
CUTS = [0, SIZE // 2, SIZE]


# --- the order ------------------------------------------------------------------------------------------------------


def planned(tmp_path, nodes: list[Any], stage: int, **outputs: Any) -> ExecutionPlan:
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
    return plan_execution(graph, replaces, member=lambda group: 0)


def scatter(name: str, made: str, **more: Any) -> Any:
    return comm("ReduceScatter", [name], [made], reduce="sum", **{"cuts": CUTS, **more})


def gather(name: str, made: str) -> Any:
    return comm("AllGather", [name], [made], cuts=CUTS, shapes=[f"{SIZE}"])


def bounds(plan: ExecutionPlan) -> dict[int, tuple[int, int, tuple[int, ...]]]:
    return {number: (each.reads, each.writes, each.calls) for number, each in plan.gather_requests().items()}


def granted(plan: ExecutionPlan) -> SharedMemory:
    """All that a plan asks for, as if this rank were alone."""
    requests = plan.gather_requests().items()
    return SharedMemory(
        gathers={number: SharedGather(np.zeros(each.count, each.dtype), CUTS, 0) for number, each in requests}
    )


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
    assert bounds(planned(tmp_path, nodes, 2, **dict.fromkeys(outputs))) == due


def test_the_update_waits_for_the_call_that_orders_it(tmp_path):
    """The first reduction's result is there long before the second's, and a rank may still read when it is."""
    nodes = [FORWARD, scatter("y", "g"), AGAIN, scatter("z", "h"), CUT, *UPDATE, DELIVER, gather("h", "n")]
    plan = planned(tmp_path, nodes, 2, n=None)
    found = Executor(plan, SessionCache(), granted(plan))
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
        made = buffer.memory if isinstance(buffer, SharedGather) else np.zeros(SIZE, F4) if buffer is None else buffer
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
    plan = planned(tmp_path, nodes, 3, **({"n": None} if more else {}))
    assert {number: each for number, each in bounds(plan).items() if number == 0} == due
    shared = granted(plan)
    final = plan.resolve(shared)
    buffers = allocate_buffers(final.assignment, shared)
    if not due:
        assert 0 not in buffers.call_buffers and "s" not in buffers.states and "b" not in buffers.gathered_views
        return
    memory = shared.gathers[0].memory
    first, second = buffers.call_buffers[0], buffers.call_buffers[1]
    assert first.memory is second.memory is memory and (first.filled, second.filled) == (False, True)
    assert same_memory(buffers.states["s"], memory) and same_memory(buffers.gathered_views["b"], memory)
    assert "s" in final.aliases[max(final.aliases)].values()


def test_gathers_that_differ_have_no_common_room(tmp_path):
    """Nor those of which the first is still read when the second fills it again."""
    other = comm("AllGather", ["s"], ["q"], cuts=CUTS, shapes=[f"2,{SIZE // 2}"])
    first, mul = gather("s", "f"), op("Mul", ["x", "f"], ["y"])
    rest = [scatter("y", "g"), *update("s")]
    assert not bounds(planned(tmp_path, [first, mul, other, op("Reshape", ["q", "stop"], ["v"]), *rest], 3, v=None))
    alias = [first, gather("s", "b"), mul, op("Neg", ["b"], ["v"]), *rest]
    assert not bounds(planned(tmp_path, alias, 3, v=None))


def test_a_shard_that_is_not_in_common_is_written_over_all_the_same(tmp_path):
    """What its gather made has memory of its own, and may be read behind the update."""
    nodes = [gather("s", "f"), op("Mul", ["x", "f"], ["y"]), scatter("y", "g"), *update("s"),
             comm("AllReduce", ["x"], ["v"], reduce="sum"), op("Add", ["f", "v"], ["n"])]  # fmt: skip
    plan = planned(tmp_path, nodes, 3, n=None)
    assert not bounds(plan) and "s" in overwritten(plan)


def overwritten(plan: ExecutionPlan) -> set[str]:
    """Rows that steps overwrite where nothing is shared."""
    return {row for rows in plan.resolve(NOT_SHARED).aliases.values() for row in rows.values()}


def test_a_shard_that_was_refused_is_in_no_buffer(tmp_path):
    """Its layers are gathered one by one, and a rank keeps no memory for all of them."""
    nodes = [gather("s", "f"), op("Mul", ["x", "f"], ["y"]), scatter("y", "g"), *update("s")]
    plan = planned(tmp_path, nodes, 3)
    assert bounds(plan)
    buffers = allocate_buffers(plan.resolve(NOT_SHARED).assignment, NOT_SHARED)
    assert not buffers.call_buffers and not buffers.states and "s" in overwritten(plan)


@pytest.mark.parametrize("member", [0, 1])
def test_a_rank_binds_its_own_shard_of_a_shared_buffer(member, tmp_path):
    """The other member writes the rest, and may have begun to train by then."""
    plan = planned(tmp_path, [FORWARD, scatter("y", "g"), CUT, *UPDATE, DELIVER], 2)
    memory = np.full(SIZE, -1, F4)
    states = {"w": np.arange(SIZE, dtype="f4")}
    shared = SharedMemory(gathers={1: SharedGather(memory, CUTS, member)})
    Executor(plan, SessionCache(), shared).bind_states(states)
    assert same_memory(states["w"], memory)
    own = slice(CUTS[member], CUTS[member + 1])
    due = np.full(SIZE, -1, F4)
    due[own] = np.arange(SIZE)[own]
    np.testing.assert_array_equal(memory, due)


@pytest.mark.parametrize("stage", [2, 3])
def test_no_reduction_writes_where_states_lie(stage, tmp_path):
    """Ranks may average what was gathered, or what is: MPI does so where it lies, when nobody reads that any more."""
    mean = {"reduce": "mean"}
    third = [gather("s", "f"), comm("AllReduce", ["f"], ["y"], **mean), scatter("y", "g"), *update("s")]
    second = [FORWARD, scatter("y", "g"), CUT, *UPDATE, DELIVER, comm("AllReduce", ["s.new"], ["h"], **mean)]
    plan = planned(tmp_path, third if stage == 3 else second, stage)
    assert bounds(plan).keys() == {0 if stage == 3 else 1} and plan.assignment.donatable == {2 if stage == 3 else 0}


def test_memory_in_which_a_rank_writes_over_what_it_has_of_another_is_not_in_common(tmp_path):
    other = [op("Slice", ["w", "end", "stop"], ["h"]), op("Add", ["h", "g"], ["u0"])]
    nodes = [FORWARD, scatter("y", "g"), *other, *update("")[1:], DELIVER]
    plan = planned(tmp_path, nodes, 2)
    assert not bounds(plan) and "h" in overwritten(plan)


def test_a_reduction_of_nothing_is_no_call_to_which_all_come(tmp_path):
    none = [op("Slice", ["x", "zero", "zero"], ["e0"]), comm("AllReduce", ["e0"], ["e1"], reduce="sum")]
    nodes = [FORWARD, *none, CUT, op("Neg", ["p"], ["s.new"]), DELIVER]
    assert not bounds(planned(tmp_path, nodes, 2))


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
