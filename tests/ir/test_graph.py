"""Nodes and graphs as gopt holds them."""

from onnx import helper

from gopt.ir.graph import Graph, Node, clone
from gopt.ir.types import TensorType


def source(**attributes):
    proto = helper.make_node("Concat", ["a", "", "b"], ["c"], name="join", doc_string="kept", axis=1, **attributes)
    return Node(
        "Concat", proto.input, proto.output, name="join", encoded=proto.SerializeToString(deterministic=True)
    ), proto


def test_a_source_node_is_written_as_it_came():
    node, proto = source()
    assert node.to_proto() == proto
    assert node.attributes == {"axis": 1}
    assert node.reads == ["a", "b"]


def test_a_rewired_node_keeps_all_else_of_its_source():
    node, proto = source()
    node.inputs = ["x", "", "b"]
    written = node.to_proto()
    assert list(written.input) == ["x", "", "b"]
    assert written.doc_string == "kept"
    assert list(proto.input) == ["a", "", "b"]


def test_a_node_of_a_pass_says_which_one_made_it():
    node = Node("Add", ["a", "b"], ["c"], made_by="shard")
    assert node.proto is None
    assert {entry.key: entry.value for entry in node.to_proto().metadata_props} == {"gopt.pass": "shard"}


def test_a_clone_shares_the_source_and_is_edited_apart():
    node, _ = source()
    copy = clone(node)
    copy.inputs = ["q"]
    assert node.inputs == ["a", "", "b"]
    assert copy.encoded is node.encoded


def test_a_changed_message_counts_once_it_is_assigned():
    node, _ = source()
    proto = node.proto
    proto.doc_string = "new"
    assert node.to_proto().doc_string == "kept"
    node.proto = proto
    assert node.to_proto().doc_string == "new"


def test_users_are_listed_once_however_often_they_read():
    node = Node("Mul", ["a", "a"], ["b"])
    graph = Graph("g", [node], {}, {}, {}, {}, None)
    assert graph.users() == {"a": [node]}
    assert graph.producers() == {"b": node}
    assert graph.type_of("b") == TensorType("undefined", None)
