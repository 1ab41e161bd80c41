"""Collectives of a source, as the recovery of roles sees them."""

import pytest
from small_graphs import TYPE, chain

from gopt.analysis.look_through import data_axes, declare_axes, declared_axes, look_through
from gopt.ir.graph import COMM, Node
from gopt.records.mesh import AxisKind


def with_call(op_type, group):
    graph = chain("xa", "bc")
    graph.nodes.insert(1, Node(op_type, ["a"], ["b"], domain=COMM, attributes={"group": group}))
    graph.types["b"] = TYPE
    return graph


@pytest.mark.parametrize(
    ("op_type", "group", "stand_in"),
    [
        ("AllReduce", "dp", "Identity"),
        ("AllReduce", "tp", "Slice"),
        ("AllReduce", "tp+dp", "Identity"),
        ("AllGather", "dp", "Concat"),
    ],
)
def test_a_call_looks_like_an_operator_that_behaves_so(op_type, group, stand_in):
    view = look_through(with_call(op_type, group))
    assert [node.op_type for node in view.graph.nodes] == ["Op", stand_in, "Op"]
    assert view.origin == (0, 1, 2)


def test_a_graph_without_calls_has_no_view():
    assert look_through(chain("xa")) is None


def test_axes_of_other_names_see_what_was_declared():
    graph = with_call("AllReduce", "zone")
    assert look_through(graph).graph.nodes[1].op_type == "Slice"
    declare_axes(graph, {"zone": AxisKind.DATA})
    assert declared_axes(graph) == {"zone": AxisKind.DATA}
    assert "zone" in data_axes(graph)
    assert look_through(graph).graph.nodes[1].op_type == "Identity"
