"""States that one gather delivers lie in its room; what is cut of them is a piece of it, unless somebody reads late."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx import helper
from runtime_graphs import comm, make

from gopt.ir.graph import Graph
from gopt.runtime.execution_plan import plan_execution
from gopt.runtime.executor import Executor
from gopt.runtime.memory import aligned
from gopt.runtime.planner.assignment import BufferSlice
from gopt.runtime.planner.buffer_assignment import assign_buffers
from gopt.runtime.planner.buffers import allocate_buffers
from gopt.runtime.session import SessionCache
from gopt.runtime.shared_memory import NOT_SHARED, SharedMemory, SharedSend

op = helper.make_node
W, B = ("float32", [2, 3]), ("float32", [2])
REPLACES = {"w.new": "w", "b.new": "b"}


def step(tmp_path, *more: Any, outputs: dict[str, Any] | None = None, order: str = "wb") -> Graph:
    """Rank 1 of two: p = [w, b][4:8], p.new = p - g, gathered."""
    nodes = [
        op("Neg", ["x"], ["n"]),
        comm("ReduceScatter", ["n"], ["g"], reduce="sum", cuts=[0, 4, 8]),
        op("Reshape", ["w", "flat"], ["wf"]),
        op("Slice", ["wf", "four", "six"], ["ws"]),
        op("Concat", ["ws", "b"] if order == "wb" else ["b", "ws"], ["p"], axis=0),
        op("Sub", ["p", "g"], ["p.new"]),
        comm("AllGather", ["p.new"], ["w.new", "b.new"], cuts=[0, 4, 8], shapes=["2,3", "2"]),
        *more,
    ]
    return make(
        tmp_path, nodes, {"w": W, "b": B, "x": ("float32", [8])}, {"w.new": W, "b.new": B} | (outputs or {}),
        constants={name: np.array([value]) for name, value in (("flat", -1), ("four", 4), ("six", 6))},
        values={"n": ("float32", [8]), "g": ("float32", [4]), "p.new": ("float32", [4]), "wf": ("float32", [6]),
                "ws": ("float32", [2]), "p": ("float32", [4])},
    )  # fmt: skip


def test_what_is_cut_of_states_is_a_piece_of_their_room(tmp_path):
    graph = step(tmp_path)
    buffers = assign_buffers(graph, REPLACES)
    assert buffers.slices == {"w": BufferSlice(1, 0, 6), "b": BufferSlice(1, 6, 8), "p": BufferSlice(1, 4, 8)}
    assert [node.op_type for node in buffers.graph.nodes] == ["Neg", "ReduceScatter", "Sub", "AllGather"]
    assert buffers.own_slices == {"p.new": frozenset({BufferSlice(1, 0, 4), BufferSlice(1, 4, 8)})}
    assert buffers.donatable == {0}
    found = allocate_buffers(buffers, NOT_SHARED)
    assert all(np.shares_memory(array, found.call_buffers[1]) for array in (*found.states.values(), found.views["p"]))
    assert buffers.input_alias("p.new", ["p", "g"], 2, {"p": 2}) == "p"
    assert buffers.input_alias("p.new", ["p", "g"], 2, {"p": 3}) is None
    assert buffers.input_alias("p.new", ["p", "g"], 2, {"p": 2, "w": 2}) is None
    assert buffers.input_alias("p.new", ["g"], 2, {"p": 2}) is None


def test_a_cut_of_another_size_than_its_type_is_no_piece(tmp_path):
    graph = step(tmp_path)  # an edited rank file: what is wrong with it, the node says when it runs
    graph.types["p"] = replace(graph.types["p"], shape=(3,))
    assert "p" not in assign_buffers(graph, REPLACES).slices


def test_what_lies_with_a_value_is_found_without_a_look_at_all_others(tmp_path):
    """Every run of a step asks, and a step may have thousands of buckets."""

    class Keyed(dict[str, BufferSlice]):
        def __iter__(self):
            raise AssertionError("all are looked at")

        items = keys = values = __iter__

    buffers = replace(
        assign_buffers(step(tmp_path), REPLACES), slices=Keyed(assign_buffers(step(tmp_path), REPLACES).slices)
    )
    assert buffers.aliases_of(["p", "g"]) == {"p", "g", "w", "b"}
    assert buffers.input_alias("p.new", ["p", "g"], 2, {"p": 2, "b": 1}) == "p"


@pytest.mark.parametrize(
    ("more", "outputs", "order"),
    [
        ([op("Neg", ["w"], ["late"])], {"late": W}, "wb"),
        ([op("Neg", ["p"], ["late"])], {"late": ("float32", [4])}, "wb"),
        ([], {"w": W}, "wb"),
    ],
)
def test_who_reads_behind_the_gather_finds_the_old_values(more, outputs, order, tmp_path):
    buffers = assign_buffers(step(tmp_path, *more, outputs=outputs, order=order), REPLACES)
    assert not buffers.gathers and not buffers.slices


def test_pieces_that_do_not_follow_one_another_are_put_together(tmp_path):
    buffers = assign_buffers(step(tmp_path, order="bw"), REPLACES)
    assert buffers.slices.keys() == {"w", "b", "ws"} and buffers.slices["ws"] == BufferSlice(1, 4, 6)
    assert "Concat" in [node.op_type for node in buffers.graph.nodes]


def test_a_value_that_is_sent_and_read_later_is_not_spare(tmp_path):
    buffers = assign_buffers(step(tmp_path, op("Abs", ["n"], ["late"]), outputs={"late": ("float32", [8])}), REPLACES)
    assert buffers.donatable == frozenset() and buffers.gathers


def test_a_single_tensor_lies_in_the_shared_buffer_that_was_granted_for_it(tmp_path):
    plan, memory = plan_execution(step(tmp_path), REPLACES), aligned([8], np.dtype("f4"))
    asked = {number: (each.call.op_type, each.count, each.dtype) for number, each in plan.send_requests().items()}
    assert asked == {0: ("ReduceScatter", 8, np.dtype("f4"))}
    granted = SharedSend(memory, [memory])
    program = Executor(plan, SessionCache(), SharedMemory(sends={0: granted}))

    def call(index, node, inputs, buffer):
        if node.op_type == "AllGather":
            buffer[:4], buffer[4:] = 0, inputs[0]
            return [buffer[:6].reshape(2, 3), buffer[6:]]
        assert buffer is granted and np.array_equal(memory, -np.arange(8)), "the segment has written it there"
        return [memory[4:]]

    feeds = {"w": np.zeros((2, 3), "f4"), "b": np.zeros(2, "f4"), "x": np.arange(8, dtype="f4")}
    made = program.run(feeds, call)
    np.testing.assert_array_equal([*made["w.new"].reshape(-1)[4:], *made["b.new"]], [4, 5, 6, 7])


def test_no_buffer_is_asked_for_what_is_read_later(tmp_path):
    graph = step(tmp_path, op("Abs", ["n"], ["late"]), outputs={"late": ("float32", [8])})
    assert plan_execution(graph, REPLACES).send_requests() == {} and assign_buffers(graph, REPLACES).sends == {}


def test_a_state_that_a_reduction_makes_does_not_lie_where_the_next_step_sends(tmp_path):
    more = [op("Abs", ["x"], ["a"]), comm("AllReduce", ["a"], ["s.new"], reduce="mean")]
    graph = step(tmp_path, *more, outputs={"s.new": ("float32", [8])})
    assert assign_buffers(graph, REPLACES | {"s.new": "s"}).donatable == {0}


@pytest.mark.parametrize("order", ["wb", "bw"])
@pytest.mark.parametrize("fills", [True, False])
def test_steps_go_on_from_the_room(order, fills, tmp_path):
    """Two steps as rank 1 with a peer that sends zeros, by an engine that fills the room and by one that does not."""
    program = Executor(plan_execution(step(tmp_path, order=order), REPLACES), SessionCache())
    seen: list[np.ndarray] = []

    def call(index, node, inputs, buffer=None):
        if node.op_type == "ReduceScatter":
            return [inputs[0][4:] * 1]
        seen.append(inputs[0].copy())
        whole = buffer if fills else np.empty(8, np.float32)
        whole[4:], whole[:4] = inputs[0], 0
        return [whole[:6].reshape(2, 3), whole[6:]]

    w, b, x = np.arange(6, dtype="f4").reshape(2, 3), np.array([6, 7], "f4"), np.ones(8, "f4")
    held = {"w": w.copy(), "b": b.copy()}
    for _ in range(2):
        p = np.concatenate(
            [held["w"].reshape(-1)[4:], held["b"]] if order == "wb" else [held["b"], held["w"].reshape(-1)[4:]]
        )
        made = program.run({**held, "x": x}, call)
        np.testing.assert_array_equal(seen[-1], p + 1)
        expected = np.concatenate([np.zeros(4, "f4"), p + 1])
        np.testing.assert_array_equal(np.concatenate([made["w.new"].reshape(-1), made["b.new"]]), expected)
        held = {"w": made["w.new"], "b": made["b.new"]}


class Late:
    """A call under way that reads its inputs as late as it can, and says the bits it found."""

    def __init__(self, inputs: list[np.ndarray]) -> None:
        self.inputs = inputs

    def result(self) -> list[np.ndarray]:
        return [self.inputs[0] * 1]


def test_a_call_under_way_still_finds_the_old_state(tmp_path):
    """The update writes a piece of the room by another name than that by which the call reads it."""
    half = 1 << 13
    rows = ["p", *(f"p{n}" for n in range(1, 8)), "p.new"]
    nodes = [
        comm("AllReduce", ["w"], ["w.sum"], reduce="sum"),
        op("Slice", ["w", "half", "end"], ["p"]),
        *(op("Sub", [row, "g"], [made]) for row, made in pairwise(rows)),
        comm("AllGather", ["p.new"], ["w.new"], cuts=[0, half, 2 * half], shapes=[f"{2 * half}"]),
    ]
    whole, part = ("float32", [2 * half]), ("float32", [half])
    graph = make(
        tmp_path, nodes, {"w": whole, "g": part}, {"w.new": whole, "w.sum": whole},
        constants={"half": np.array([half]), "end": np.array([2 * half])}, values=dict.fromkeys(rows, part),
    )  # fmt: skip
    program = Executor(plan_execution(graph, {"w.new": "w"}), SessionCache())
    assert assign_buffers(graph, {"w.new": "w"}).slices.keys() == {"w", "p"}

    def call(index, node, inputs, buffer=None):
        if node.op_type == "AllReduce":
            return Late(inputs)
        assert np.shares_memory(inputs[0], buffer), "the update is made in place"
        buffer[:half] = 0
        return [buffer]

    w = np.arange(2 * half, dtype="f4")
    made = program.run({"w": w.copy(), "g": np.ones(half, "f4")}, call)
    np.testing.assert_array_equal(made["w.sum"], w)
    np.testing.assert_array_equal(made["w.new"][half:], w[half:] - 8)
