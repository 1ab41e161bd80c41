"""Nodes as a file has them: what the bodies of control flow read from outside."""

from __future__ import annotations

from pathlib import Path

from model_files import branch, save, small, value
from onnx import NodeProto, TensorProto, helper

from gopt.ir.load import load


def test_captures_reach_into_nested_bodies(tmp_path: Path) -> None:
    inner = helper.make_node("If", ["flag"], ["inner"], then_branch=branch("t", "x"), else_branch=branch("e", "late"))
    outer_then = helper.make_graph([inner], "then", [], [value("inner", None)])
    same = helper.make_node("Identity", ["w"], ["same"])
    outer_else = helper.make_graph([same], "else", [], [value("same", None)])
    nodes = [
        helper.make_node("Neg", ["x"], ["late"], name="late"),
        helper.make_node("If", ["flag"], ["y"], name="if", then_branch=outer_then, else_branch=outer_else),
    ]
    flag = value("flag", (), TensorProto.BOOL)
    model = small(nodes=nodes, inputs=[value("x", (3, 4)), flag], outputs=[value("y", (3, 4))])
    graph = load(save(tmp_path, model))
    assert [node.name for node in graph.nodes] == ["late", "if"], "a captured value counts as read"
    assert graph.nodes[1].captures == ("w", "flag", "late", "x"), "in order; make_node sorts attributes"


def loop(body_reads: str) -> NodeProto:
    body = helper.make_graph(
        [helper.make_node("Add", ["carried", body_reads], ["next"]), helper.make_node("Identity", ["go"], ["go_on"])],
        "body",
        [value("i", (), TensorProto.INT64), value("go", (), TensorProto.BOOL), value("carried", None)],
        [value("go_on", (), TensorProto.BOOL), value("next", None)],
    )
    return helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)


def test_a_body_s_own_values_are_no_captures(tmp_path: Path) -> None:
    model = small(nodes=[loop("b")], inputs=[value("x"), value("b", ()), value("count", (), TensorProto.INT64)])
    (node,) = load(save(tmp_path, model)).nodes
    assert node.captures == ("b",)
