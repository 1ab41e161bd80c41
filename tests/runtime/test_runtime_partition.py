"""Where a rank's graph is cut, and what is let go when."""

from __future__ import annotations

from onnx import helper
from runtime_graphs import comm, make, segments, sharded_sgd

from gopt.runtime.partition import CallStep, Segment, last_uses, partition

op = helper.make_node


def test_a_segment_is_what_stands_between_two_calls(tmp_path):
    graph = sharded_sgd(tmp_path, 0, [0, 8, 8])
    assert segments(graph) == [
        ["wt", "xw", "y", "yy", "loss", "yt", "gw", "gb"], ["ReduceScatter"],
        ["md", "m.new", "step", "p.new"], ["AllGather"],
    ]  # fmt: skip


def test_the_order_of_the_file_is_kept(tmp_path):
    kind = ("float32", [2])
    nodes = [
        op("Neg", ["x"], ["n"]), comm("AllReduce", ["x"], ["a"]), op("Abs", ["n"], ["g"]), op("Exp", ["n"], ["late"]),
        comm("AllReduce", ["g"], ["b"]), op("Add", ["b", "late"], ["y"]), op("Relu", ["x"], ["out"]),
    ]  # fmt: skip
    graph = make(tmp_path, nodes, {"x": kind}, {"y": kind, "out": kind, "a": kind}, values={"b": kind})
    assert segments(graph) == [["n"], ["AllReduce"], ["g", "late"], ["AllReduce"], ["y", "out"]]


def test_border_values_are_listed_once_in_order_of_use(tmp_path):
    first, call, second, _ = partition(sharded_sgd(tmp_path, 0, [0, 8, 8]))
    assert isinstance(first, Segment) and isinstance(call, CallStep) and isinstance(second, Segment)
    assert first.inputs == ("w", "x", "b", "axis")
    assert first.outputs == ("loss", "gw", "gb")
    assert (call.inputs, call.outputs) == (("gw", "gb"), ("g",))
    assert second.inputs == ("m", "decay", "g", "rate", "p")
    assert second.outputs == ("m.new", "p.new")


def test_values_are_dropped_after_their_last_reader(tmp_path):
    graph = sharded_sgd(tmp_path, 0, [0, 8, 8])
    gone = last_uses(partition(graph), list(graph.outputs))
    assert set(gone[0]) == {"w", "x", "b", "axis"}
    assert set(gone[1]) == {"gw", "gb"}
    assert set(gone[2]) == {"m", "decay", "g", "rate", "p"}
    assert gone[3] == ()


def test_calls_in_a_row_have_no_segment_between_them(tmp_path):
    nodes = [comm("AllReduce", ["x"], ["y"]), comm("AllReduce", ["y"], ["z"]), op("Relu", ["x"], ["r"])]
    kind = ("float32", [2])
    graph = make(tmp_path, nodes, {"x": kind}, {"z": kind, "r": kind}, values={"y": kind})
    assert segments(graph) == [["AllReduce"], ["AllReduce"], ["r"]]


def test_what_nobody_reads_is_left_out(tmp_path):
    nodes = [op("Relu", ["x"], ["dying"]), op("Relu", ["dying"], ["dead"]), comm("AllReduce", ["x"], ["y"])]
    kind = ("float32", [2])
    graph = make(tmp_path, nodes, {"x": kind}, {"y": kind})
    assert segments(graph) == [["AllReduce"]]


def test_values_that_bodies_capture_cross_the_border(tmp_path):
    kind = ("float32", [2])
    body = helper.make_graph([op("Neg", ["s"], ["n"])], "b", [], [helper.make_tensor_value_info("n", 1, [2])])
    other = helper.make_graph([op("Abs", ["s"], ["m"])], "b", [], [helper.make_tensor_value_info("m", 1, [2])])
    nodes = [
        comm("AllReduce", ["x"], ["s"]),
        op("If", ["c"], ["y"], then_branch=body, else_branch=other),
    ]
    graph = make(tmp_path, nodes, {"x": kind, "c": ("bool", [])}, {"y": kind}, values={"s": kind})
    call, segment = partition(graph)
    assert isinstance(call, CallStep)
    assert segment.inputs == ("c", "s")
