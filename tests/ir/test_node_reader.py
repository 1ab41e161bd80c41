"""Nodes read from their bytes are those that are read as messages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from model_files import branch
from onnx import ModelProto, NodeProto, helper

from gopt.errors import InputError
from gopt.ir.graph import Node
from gopt.ir.node_reader import read_nodes
from gopt.ir.symbol_table import SymbolTable
from gopt.ir.wire_format import encoded_nodes, field


def node(op_type: str, inputs: list[str], outputs: list[str], **rest: object) -> NodeProto:
    return helper.make_node(op_type, inputs, outputs, **rest)


def read(data: bytes, *, from_bytes: bool, own: bool = False) -> list[Node]:
    model, symbols = ModelProto.FromString(data), SymbolTable(None if own else "rename it")
    for name in ("x", "flag"):
        symbols.define(name, "a graph input")
    encoded = encoded_nodes(data) if from_bytes else []
    assert not from_bytes or len(encoded) == len(model.graph.node)
    return read_nodes(model.graph.node, encoded, symbols, own)


def model_of(*nodes: NodeProto) -> bytes:
    graph = helper.make_graph(nodes, "graph", [], [])
    return helper.make_model(graph, producer_name="test").SerializeToString()


def facts(nodes: list[Node]) -> list[tuple[object, ...]]:
    return [
        (each.op_type, each.domain, each.inputs, each.outputs, each.name, each.encoded, each.captures, each.made_by,
         {key: str(value) for key, value in each.attributes.items()}, each.attribute_bytes())
        for each in nodes
    ]  # fmt: skip


LONG = "n" * 200
MISREAD = "n" * 199 + "\x12"
"""Of two bytes of length: read as one, the name would end before the tag that it ends with."""
NODES = [
    node("Neg", ["x"], ["a"], name="first"),
    node("Neg", ["a"], ["b"]),
    node("Neg", ["b"], ["ü"], name="ü"),
    node("Neg", ["ü"], [LONG], name=LONG),
    node("Neg", [LONG], ["c"]),
    node("Neg", ["c"], [MISREAD]),
    node("Neg", [MISREAD], ["o" * 17]),
    node("Clip", ["c", "", "x"], ["d"]),
    node("Clip", ["d", "", "x"], ["e"]),
    node("Transpose", ["e"], ["f"], perm=[1, 0]),
    node("Transpose", ["f"], ["g"], perm=[1, 0]),
    node("Transpose", ["g"], ["h"], perm=[0, 1]),
    node("Split", ["h"], ["i", "j"], num_outputs=2),
    node("Split", ["i"], ["k", "l"], num_outputs=2),
    node("If", ["flag"], ["m"], then_branch=branch("t", "x"), else_branch=branch("e", "k")),
    node("If", ["flag"], ["n"], then_branch=branch("t", "x"), else_branch=branch("e", "k")),
    node("Own", ["m"], ["o"], domain="a.domain"),
    node("Own", ["n"], ["p"], domain="a.domain"),
    node("Constant", [], ["u"], value_floats=[1.0] * 1000),
    node("Constant", [], ["v"], value_floats=[1.0] * 1000),
    node("LayerNormalization", ["x", "a"], ["q", "", "r"]),
    node("LayerNormalization", ["x", "b"], ["s", "", "t"]),
]


def test_bytes_give_the_nodes_that_messages_give() -> None:
    data = model_of(*NODES)
    assert facts(read(data, from_bytes=True)) == facts(read(data, from_bytes=False))


def test_readers_share_the_name_of_a_value() -> None:
    chain = [node("Neg", ["x"], ["first"]), node("Neg", ["first"], ["second"]), node("Abs", ["second"], ["third"])]
    nodes = read(model_of(*chain, node("Neg", ["third"], ["last"])), from_bytes=True)
    assert all(after.inputs[0] is before.outputs[0] for before, after in pairwise(nodes))


def test_metadata_is_kept_and_tells_the_pass() -> None:
    nodes = [node("Neg", ["x"], ["a"]), node("Neg", ["a"], ["b"]), node("Neg", ["b"], ["c"])]
    for each in nodes[:2]:
        entry = each.metadata_props.add()
        entry.key, entry.value = "gopt.pass", "shard"
    data = model_of(*nodes)
    found = read(data, from_bytes=True, own=True)
    assert [each.made_by for each in found] == ["shard", "shard", ""]
    assert facts(found) == facts(read(data, from_bytes=False, own=True))


def test_nodes_in_an_unusual_order_of_fields_are_read_as_messages() -> None:
    """Such bytes are not kept: the same graph gives the same bytes on disk."""
    end = field(6, b"a comment") + field(4, b"Neg")
    odd = [field(1, b"x") + field(2, b"a") + end, field(1, b"a") + field(2, b"b") + end]
    graph = b"".join(field(1, each) for each in odd)
    data = helper.make_model(helper.make_graph([], "", [], [])).SerializeToString() + field(7, graph)
    model = ModelProto.FromString(data)
    symbols = SymbolTable(None)
    symbols.define("x", "a graph input")
    nodes = read_nodes(model.graph.node, odd, symbols, False)
    assert [(each.inputs, each.outputs) for each in nodes] == [(["x"], ["a"]), (["a"], ["b"])]
    assert [each.encoded for each in nodes] == [each.SerializeToString() for each in model.graph.node]


def test_a_graph_in_two_fields_gives_no_bytes() -> None:
    """Protobuf joins both, so that places of nodes in one of them are none in the graph."""
    data = model_of(NODES[0])
    assert len(encoded_nodes(data)) == 1
    assert encoded_nodes(data + field(7, field(1, NODES[1].SerializeToString()))) == []


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (node("Neg", ["a"], ["a"]), "value 'a' is defined twice"),
        (node("Neg", ["a"], ["gopt.b"]), "value 'gopt.b': names that begin with 'gopt.'"),
        (node("Neg", ["a"], ["b"], name="gopt.b"), "node 'gopt.b': names that begin with 'gopt.'"),
        (node("Neg", ["a"], ["b" * 5000]), "longer than"),
        (node("Split", ["a"], ["b"], num_outputs=2), "num_outputs"),
    ],
)
def test_names_of_a_later_node_are_refused_as_those_of_the_first(late: NodeProto, message: str) -> None:
    early = [node("Neg", ["x"], ["a"]), node("Split", ["a"], ["y", "z"], num_outputs=2)]
    for from_bytes in (True, False):
        with pytest.raises(InputError, match=message):
            read(model_of(*early, late), from_bytes=from_bytes)
