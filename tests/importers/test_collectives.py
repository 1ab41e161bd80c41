"""Collectives that a source already has."""

import pytest
from onnx import ModelProto

from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.importers.collectives import COPIES, DECLARED, MICROSOFT, TORCH, parse_groups, recognise
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


def test_megatron_s_pair_is_a_copy_and_a_reduction():
    made = [graph_with(op_type) for op_type in ("MegatronF", "MegatronG")]
    for graph in made:
        recognise(graph, {"4": "tp"})
    copy, reduction = (graph.nodes[0] for graph in made)
    assert (copy.domain, copy.op_type, made[0].metadata[COPIES]) == ("", "Identity", "b=tp")
    assert (reduction.domain, reduction.op_type, reduction.attributes) == (COMM, "AllReduce", {"group": "tp"})
    with pytest.raises(UnsupportedError, match="MegatronF 'call' has group_type 4"):
        recognise(graph_with("MegatronF"), {"1": "tp"})


@pytest.mark.parametrize(
    ("op_type", "attributes", "rows", "made"),
    [
        ("all_reduce", {"reduce_op": "avg"}, 2, ("AllReduce", {"reduce": "mean"})),
        ("all_gather_into_tensor", {"group_size": 2}, 4, ("AllGather", {"axis": 0, "sizes": [2, 2]})),
        ("reduce_scatter_tensor", {"reduce_op": "sum", "group_size": 2}, 1,
         ("ReduceScatter", {"reduce": "sum", "axis": 0, "sizes": [1, 1]})),
    ],
)  # fmt: skip
def test_torch_s_functional_collectives(op_type, attributes, rows, made):
    graph = graph_with(op_type, domain=TORCH, out=TensorType("float32", (rows, 3)), group_name="0", **attributes)
    graph.nodes.append(Node("wait_tensor", ["b"], ["c"], domain=TORCH, attributes={}))
    graph.types["c"] = graph.types["b"]
    recognise(graph, {"0": "tp"})
    call, wait = graph.nodes
    assert (call.domain, call.op_type, call.attributes) == (COMM, made[0], {"group": "tp", **made[1]})
    assert (wait.domain, wait.op_type) == ("", "Identity")


@pytest.mark.parametrize(
    ("op_type", "attributes", "said"),
    [
        ("all_to_all_single", {"group_name": "0"}, "splits and concatenates the same axis"),
        ("reduce_scatter_tensor", {"group_name": "0", "group_size": 3}, "2 rows cannot be shared out evenly"),
        ("all_reduce", {"group_name": "7"}, "has group_type 7"),
        ("broadcast", {"group_name": "0"}, "cannot take"),
    ],
)
def test_a_functional_collective_that_gopt_cannot_take(op_type, attributes, said):
    with pytest.raises(UnsupportedError, match=said):
        recognise(graph_with(op_type, domain=TORCH, **attributes), {"0": "tp"})
