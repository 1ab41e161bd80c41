"""Nodes and graphs as gopt holds them."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from gopt.ir.graph import Graph, Node, Tensor, clone, read_type, value_info
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


def test_a_tensor_of_parts_or_of_a_cast_is_put_together():
    rows = [Tensor(TensorType("float32", (2,)), array=np.array(pair, np.float32)) for pair in ([1, 2], [3, 4])]
    whole = Tensor(TensorType("float32", (2, 2)), parts=tuple(rows))
    np.testing.assert_array_equal(whole.numpy(), [[1, 2], [3, 4]])
    half = Tensor(TensorType("float16", (2,)), cast_of=rows[0])
    assert half.numpy().dtype == np.float16


def test_a_tensor_of_an_archive_is_read_once():
    calls = []
    tensor = Tensor(TensorType("float32", (1,)), reader=lambda: calls.append(0) or np.ones(1, np.float32))
    assert tensor.numpy() is tensor.numpy()
    assert calls == [0]


def test_a_tensor_of_the_file_is_its_message():
    proto = numpy_helper.from_array(np.arange(3), "w")
    np.testing.assert_array_equal(Tensor(TensorType("int64", (3,)), proto=proto).numpy(), [0, 1, 2])


@pytest.mark.parametrize("shape", [(2, "N", None), (), None])
def test_types_survive_their_message(shape):
    type = TensorType("float16", shape)
    assert read_type(value_info("x", type).type) == type


def test_what_is_no_dense_tensor_has_no_type():
    assert (
        read_type(helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, []))).shape is None
    )
