"""Ranks as threads: results, and every way in which ranks can fail one another."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest
from onnx import helper
from runtime_graphs import alone, comm, expected_sgd, make, sgd_feeds, sharded_sgd

from gopt.errors import InvariantError, RunError
from gopt.ir.graph import COMM, Node
from gopt.records.mesh import Mesh
from gopt.runtime.engines.threads import ThreadGroup, run_ranks
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache

op = helper.make_node
VECTOR = ("float32", [2])
TWO = Mesh.parse("shard=2")
ONES = np.ones(2, np.float32)
LONG = 600.0
"""Seconds that nothing takes, on however busy a machine."""


def together(group: ThreadGroup, *calls):
    """Make one call per rank, each in a thread: (rank, node, inputs). Returns results or errors."""
    results = [None] * len(calls)

    def one(place, rank, node, inputs):
        try:
            results[place] = group.call(rank, 0, node, inputs)
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=one, args=(place, *call)) for place, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    return results


def node(op_type: str, *, inputs=("x",), outputs=("y",), group="shard", **attributes) -> Node:
    return Node(op_type, inputs, outputs, domain=COMM, attributes={"group": group, **attributes})


def messages(results) -> set[str]:
    assert all(isinstance(result, RunError) for result in results), results
    return {result.message for result in results}


# --- right results --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "dtype", "tolerance"),
    [
        ([0, 5, 8], np.float32, 1e-6), ([0, 8, 8], np.float32, 1e-6), ([0, 0, 3, 8], np.float32, 1e-6),
        ([0, 3, 3, 8], np.float32, 1e-6), ([0, 8, 8, 8], np.float64, 1e-13), ([0, 5, 8], np.float16, 1e-2),
        ([0, 8, 8], ml_dtypes.bfloat16, 1e-1),
    ],
)  # fmt: skip
def test_a_sharded_step_equals_the_whole_one(tmp_path, cuts, dtype, tolerance):
    """Two and three ranks, empty shards among them, two steps in a row."""
    cache, ranks = SessionCache(), len(cuts) - 1
    mesh = Mesh((("shard", ranks),))
    programs = [Executor(sharded_sgd(tmp_path, rank, cuts, np.dtype(dtype).name), cache) for rank in range(ranks)]
    feeds = sgd_feeds(cuts, dtype=dtype)
    for _ in range(2):
        outputs = run_ranks(programs, feeds, mesh)
        wide = [{name: array.astype(np.float64) for name, array in given.items()} for given in feeds]
        bucket, momentum, losses = expected_sgd(wide)
        for rank, found in enumerate(outputs):
            start, stop = cuts[rank : rank + 2]
            assert {array.dtype for array in found.values()} == {np.dtype(dtype)}
            np.testing.assert_allclose(found["p.new"].astype(float), bucket[start:stop], tolerance, tolerance)
            np.testing.assert_allclose(found["m.new"].astype(float), momentum[start:stop], tolerance, tolerance)
            np.testing.assert_allclose(float(found["loss"]), losses[rank], tolerance * 10)
            assert found["w.new"].tobytes() == outputs[0]["w.new"].tobytes()
            assert found["b.new"].tobytes() == outputs[0]["b.new"].tobytes()
            feeds[rank] |= {"w": found["w.new"], "b": found["b.new"], "p": found["p.new"], "m": found["m.new"]}
    whole = np.concatenate([outputs[0]["w.new"].ravel(), outputs[0]["b.new"]])
    assert whole.tobytes() == np.concatenate([found["p.new"] for found in outputs]).tobytes()


def test_groups_of_one_name_are_apart_on_a_mesh_of_two_axes(tmp_path):
    mesh = Mesh.parse("dp=2,shard=2")
    nodes = [comm("AllReduce", ["x"], ["s"]), comm("AllReduce", ["s"], ["d"], group="dp"),
             comm("AllReduce", ["x"], ["a"], group="dp+shard")]  # fmt: skip
    graph = make(tmp_path, nodes, {"x": VECTOR}, {"s": VECTOR, "d": VECTOR, "a": VECTOR})
    feeds = [{"x": np.full(2, 10**rank, np.float32)} for rank in range(4)]
    found = run_ranks([alone(graph)] * 4, feeds, mesh)
    assert [int(outputs["s"][0]) for outputs in found] == [11, 11, 1100, 1100]
    assert {int(outputs[name][0]) for outputs in found for name in "da"} == {1111}


def test_sends_are_buffered_so_that_two_ranks_may_cross(tmp_path):
    graphs = []
    for rank in range(2):
        other = 1 - rank
        nodes = [
            comm("Send", ["x"], [], peer=other, tag=0),
            comm("Send", ["z"], [], peer=other, tag=1),
            comm("Recv", [], ["b"], peer=other, tag=1, dtype="float32", shapes=["2"]),
            comm("Recv", [], ["a"], peer=other, tag=0, dtype="float32", shapes=["2"]),
        ]
        graphs.append(make(tmp_path, nodes, {"x": VECTOR, "z": VECTOR}, {"a": VECTOR, "b": VECTOR}))
    feeds = [{"x": ONES * rank, "z": ONES * (rank + 5)} for rank in range(2)]
    found = run_ranks([alone(graph) for graph in graphs], feeds, TWO)
    assert [(o["a"][0], o["b"][0]) for o in found] == [(1, 6), (0, 5)]


def test_outputs_off_the_root_are_undefined_and_broadcast_has_no_inputs_there(tmp_path):
    graphs = []
    for rank in range(2):
        nodes = [comm("Reduce", ["x"], ["s"], root=1)]
        nodes.append(comm("Broadcast", ["s"] if rank else [], ["y"], root=1, dtype="float32", shapes=["2"]))
        graphs.append(make(tmp_path, nodes, {"x": VECTOR}, {"y": VECTOR}))
    found = run_ranks([alone(graph) for graph in graphs], [{"x": ONES}, {"x": ONES * 2}], TWO)
    assert [outputs["y"].tolist() for outputs in found] == [[3, 3], [3, 3]]


def test_many_ranks_and_calls_stay_in_step(tmp_path):
    nodes = [comm("AllReduce", [f"v{i}"], [f"v{i + 1}"], reduce="mean") for i in range(30)]
    graph = make(tmp_path, nodes, {"v0": VECTOR}, {"v30": VECTOR})
    mesh = Mesh((("shard", 16),))
    found = run_ranks([alone(graph)] * 16, [{"v0": ONES * rank} for rank in range(16)], mesh)
    assert {outputs["v30"].tobytes() for outputs in found} == {(ONES * 7.5).tobytes()}


# --- ranks that disagree --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ((node("AllReduce"), [ONES]), (node("AllReduce", reduce="max"), [ONES]), ["shard sum", "shard max"]),
        ((node("AllReduce"), [ONES]), (node("AllReduce"), [np.ones(3, np.float32)]), ["8 bytes", "12 bytes"]),
        ((node("AllReduce"), [ONES]), (node("AllReduce"), [ONES.astype(np.float16)]), ["float32", "float16"]),
        (
            (node("ReduceScatter", cuts=[0, 1, 2]), [ONES]), (node("ReduceScatter", cuts=[0, 2, 2]), [ONES]),
            ["cuts=(0, 1, 2)", "cuts=(0, 2, 2)"],
        ),
        ((node("Reduce", root=0), [ONES]), (node("AllReduce"), [ONES]), ["Reduce shard", "AllReduce shard"]),
    ],
)  # fmt: skip
def test_calls_that_differ_are_told_to_both_sides(one, other, words):
    results = together(ThreadGroup(TWO, LONG), (0, *one), (1, *other))
    (message,) = messages(results)
    assert message.startswith("calls of group shard do not match: rank 0 makes call 0, ")
    assert "; rank 1 makes call 0, " in message
    first, second = message.split("; rank 1")
    assert words[0] in first and words[1] in second


def test_calls_in_another_order_are_found(tmp_path):
    a, b = ("float32", [2]), ("float32", [3])
    nodes = [comm("AllReduce", ["a"], ["c"]), comm("AllReduce", ["b"], ["d"])]
    spec = ({"a": a, "b": b}, {"c": a, "d": b})
    programs = [alone(make(tmp_path, nodes, *spec)), alone(make(tmp_path, nodes[::-1], *spec))]
    feeds = [{"a": ONES, "b": np.ones(3, np.float32)}] * 2
    with pytest.raises(RunError, match=r"do not match: rank 0 makes call 0, .*'2'.*; rank 1 makes call 0, .*'3'"):
        run_ranks(programs, feeds, TWO)


def test_a_receiver_that_expects_another_shape_is_told(tmp_path):
    send = make(tmp_path, [comm("Send", ["x"], [], peer=1, tag=3)], {"x": VECTOR}, {"x": VECTOR})
    recv = [comm("Recv", [], ["y"], peer=0, tag=3, dtype="float32", shapes=["3"])]
    got = make(tmp_path, recv, {"x": VECTOR}, {"y": ("float32", [3])})
    with pytest.raises(RunError, match=r"rank 0 makes call 0, Send .*; rank 1 makes call 0, Recv"):
        run_ranks([alone(send), alone(got)], [{"x": ONES}] * 2, TWO)


def test_a_peer_must_be_of_the_group():
    group = ThreadGroup(TWO)
    with pytest.raises(RunError, match=r"rank 7 is not a member of that group"):
        group.call(0, 0, node("Send", outputs=(), peer=7, tag=0), [ONES])


def test_ranks_that_wait_for_one_another_crosswise_are_told_at_once(tmp_path):
    """Every group's own calls are in order; across groups they are not. The deadline would say something else."""
    mesh = Mesh.parse("dp=2,shard=2")
    nodes = [comm("AllReduce", ["x"], ["y"]), comm("AllReduce", ["x"], ["z"], group="dp")]
    spec = ({"x": VECTOR}, {"y": VECTOR, "z": VECTOR})
    one, other = alone(make(tmp_path, nodes, *spec)), alone(make(tmp_path, nodes[::-1], *spec))
    with pytest.raises(RunError, match=r"no rank can go on: rank 0 waits for rank 1 at call 0, AllReduce shard"):
        run_ranks([one, other, other, one], [{"x": ONES}] * 4, mesh, LONG)


def test_a_rank_that_has_finished_is_not_waited_for(tmp_path):
    calls = [comm("AllReduce", ["x"], ["y"]), comm("AllReduce", ["y"], ["z"])]
    programs = [
        alone(make(tmp_path, calls, {"x": VECTOR}, {"z": VECTOR})),
        alone(make(tmp_path, calls[:1], {"x": VECTOR}, {"y": VECTOR})),
    ]
    with pytest.raises(RunError, match=r"waits for rank 1 at call 1, .*; rank 1 has finished"):
        run_ranks(programs, [{"x": ONES}] * 2, TWO, LONG)


# --- ranks that fail ------------------------------------------------------------------------------------------------


def failing(tmp_path):
    """The second input decides whether the Reshape before the call works."""
    nodes = [op("Reshape", ["x", "shape"], ["r"]), comm("AllReduce", ["r"], ["y"])]
    spec = {"x": VECTOR, "shape": ("int64", [1])}
    return alone(make(tmp_path, nodes, spec, {"y": VECTOR}, values={"r": VECTOR}))


def test_a_rank_that_fails_stops_the_others_at_once(tmp_path):
    program = failing(tmp_path)
    feeds = [{"x": ONES, "shape": np.array([size])} for size in (2, 2, 7, 2)]
    with pytest.raises(RunError, match=r"^rank 2: ONNX Runtime failed"):
        run_ranks([program] * 4, feeds, Mesh.parse("shard=4"), LONG)


def test_what_the_others_are_told():
    group = ThreadGroup(Mesh.parse("shard=3"), LONG)
    threading.Timer(0.1, group.abort, (2, RunError("out of memory"))).start()
    results = together(group, (0, node("AllReduce"), [ONES]), (1, node("AllReduce"), [ONES]))
    assert messages(results) == {"stopped, because rank 2 failed: out of memory"}


def test_a_defect_in_a_rank_keeps_its_type(tmp_path):
    class Broken:
        def run(self, feeds, call):
            raise ZeroDivisionError("oops")

    with pytest.raises(ZeroDivisionError) as caught:
        run_ranks([failing(tmp_path), Broken()], [{"x": ONES, "shape": np.array([2])}, {}], TWO)
    assert caught.value.__notes__ == ["on rank 1"]


def test_a_call_that_fails_while_it_runs_fails_in_all(monkeypatch):
    def broken(entries):
        raise MemoryError("no room")

    monkeypatch.setattr("gopt.runtime.engines.threads._execute", broken)
    results = together(ThreadGroup(TWO, LONG), (0, node("AllReduce"), [ONES]), (1, node("AllReduce"), [ONES]))
    assert sorted(type(result).__name__ for result in results) == ["MemoryError", "RunError"]


def test_a_rank_that_does_not_come_is_named_after_the_deadline():
    group = ThreadGroup(Mesh.parse("shard=4"), 0.2)
    wait_for = group._changed.wait_for

    def until_both_wait(over, timeout):  # only then the time begins to run
        wait_for(lambda: over() or len(group._waiting) == 2, LONG)
        return over() or wait_for(over, timeout)

    group._changed.wait_for = until_both_wait
    results = together(group, *[(rank, node("AllReduce"), [ONES]) for rank in (0, 2)])
    (message,) = messages(results)
    assert "after 0.2 s, rank " in message
    assert "still waits for ranks 1, 3 at call 0, AllReduce shard sum" in message


def test_a_message_that_does_not_come_is_named_after_the_deadline():
    group = ThreadGroup(TWO, 0.2)
    recv = node("Recv", inputs=(), peer=0, tag=9, dtype="float32", shapes=["2"])
    with pytest.raises(RunError, match=r"rank 1 still waits for rank 0 at call 4, Recv"):
        group.call(1, 4, recv, [])


def test_a_slow_call_is_not_late(monkeypatch):
    from gopt.runtime.engines import threads

    execute, group = threads._execute, ThreadGroup(TWO, 0.1)
    wait_for, running, late = group._changed.wait_for, threading.Event(), threading.Event()

    def slow(entries):
        with group._changed:
            running.set()
            group._changed.notify_all()
        assert late.wait(LONG)
        return execute(entries)

    def until_it_runs(over, timeout):  # only then the time begins to run
        wait_for(lambda: over() or running.is_set(), LONG)
        ended = wait_for(over, timeout)
        if not ended:
            late.set()
        return ended

    monkeypatch.setattr(threads, "_execute", slow)
    group._changed.wait_for = until_it_runs
    results = together(group, (0, node("AllReduce"), [ONES]), (1, node("AllReduce"), [ONES]))
    assert [result[0].tolist() for result in results] == [[2, 2], [2, 2]]


def test_a_failed_group_takes_no_more_calls():
    group = ThreadGroup(TWO)
    group.abort(1, RunError("gone"))
    for made in (node("AllReduce"), node("Send", outputs=(), peer=1, tag=0)):
        with pytest.raises(RunError, match=r"stopped, because rank 1 failed: gone"):
            group.call(0, 0, made, [ONES])


def test_programs_and_mesh_must_fit(tmp_path):
    with pytest.raises(InvariantError, match=r"1 programs and 1 feeds for the 2 ranks"):
        run_ranks([failing(tmp_path)], [{}], TWO)
