"""Collectives that a source already has."""

import pytest
from onnx import ModelProto

from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.importers.collectives import DECLARED, MICROSOFT, parse_groups, recognise
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.types import TensorType

TYPE, LONG = TensorType("float32", (2, 3)), TensorType("float32", (9,))


def graph_with(op_type, *, domain=MICROSOFT, out=TYPE, **attributes):
    node = Node(op_type, ["a"], ["b"], domain=domain, name="call", attributes=attributes)
    return Graph("g", [node], {"a": TYPE}, {"b": out}, {}, {"a": TYPE, "b": out}, ModelProto())


def test_groups_are_read_from_text():
    assert parse_groups("1=shard, 4=dp+tp") == {"1": "shard", "4": "dp+tp"}
    for text in ("shard", "x=shard", "1=", "1=a b"):
        with pytest.raises(OptionError, match="as a group type"):
            parse_groups(text)


def test_a_group_number_means_what_was_declared():
    graph = graph_with("NcclAllReduce", group_type=1)
    recognise(graph, {"1": "dp"})
    (node,) = graph.nodes
    assert (node.domain, node.op_type, node.attributes["group"]) == (COMM, "AllReduce", "dp")
    assert {entry.key: entry.value for entry in graph.header.metadata_props} == {DECLARED: "1=dp"}
    assert [opset.domain for opset in graph.header.opset_import] == [COMM]


def test_the_user_goes_before_the_model_s_own_metadata():
    graph = graph_with("NcclAllReduce", group_type=1)
    graph.metadata[DECLARED] = "1=tp,2=pp"
    recognise(graph, {"1": "dp"})
    assert graph.nodes[0].attributes["group"] == "dp"


@pytest.mark.parametrize(
    ("graph", "kind", "said"),
    [
        (graph_with("NcclAllReduce", group_type=1), UnsupportedError, "has group_type 1: that number means"),
        (graph_with("AllReduce"), UnsupportedError, "'call' names no group"),
        (graph_with("NcclReduceScatter"), UnsupportedError, "sharded already"),
        (graph_with("Send"), UnsupportedError, "cannot take"),
        (graph_with("AllToEverybody", domain=COMM), InputError, "has no operator 'AllToEverybody'"),
        (graph_with("AllReduce", domain=COMM, group="dp", out=LONG), InputError, "the file says"),
    ],
)  # fmt: skip
def test_a_call_that_gopt_cannot_take_is_refused_by_name(graph, kind, said):
    with pytest.raises(kind, match=said):
        recognise(graph, {})


def test_a_graph_without_calls_is_left_alone():
    graph = graph_with("Gelu")
    node = graph.nodes[0]
    recognise(graph, {"1": "dp"})
    assert graph.nodes == [node]
    assert not graph.header.opset_import
