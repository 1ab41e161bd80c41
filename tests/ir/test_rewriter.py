"""Changes to a graph, and where new nodes stand."""

import pytest

from gopt.errors import InvariantError
from gopt.ir.graph import Graph, Node
from gopt.ir.rewriter import GraphRewriter, Removal
from gopt.ir.types import TensorType

TYPE = TensorType("float32", (2,))


@pytest.fixture
def graph():
    """x -> a -> b -> c"""
    nodes = [Node("Relu", [old], [new], name=new) for old, new in ("xa", "ab", "bc")]
    return Graph("g", nodes, {"x": TYPE}, {"c": TYPE}, {}, dict.fromkeys("xabc", TYPE), None)


def names(graph):
    return [node.outputs[0] for node in graph.nodes]


def test_a_new_node_stands_where_it_is_due(graph):
    rewriter = GraphRewriter(graph, "p")
    first, last = graph.nodes[0], graph.nodes[2]
    rewriter.add("Neg", ["x"], {"early": TYPE}, before=first)
    rewriter.add("Neg", ["a"], {"behind": TYPE}, after=first)
    rewriter.add("Neg", ["x"], {"last": TYPE})
    rewriter.finish()
    assert names(graph) == ["early", "a", "behind", "b", "c", "last"]
    assert rewriter.latest(["b", "behind"]) is graph.nodes[3]
    assert rewriter.latest(["x"]) is None
    assert rewriter.earliest([last, first]) is first
    assert graph.nodes[0].made_by == "p"


def test_a_removed_node_is_missing_and_has_a_reason(graph):
    rewriter = GraphRewriter(graph, "p")
    source = graph.nodes[1]
    rewriter.remove(source, "not here")
    rewriter.rewire(graph.nodes[2], "b", "a")
    assert rewriter.lookup(source) is None
    rewriter.finish()
    assert names(graph) == ["a", "c"]
    assert rewriter.removed == [Removal([source], "not here")]


def test_a_renamed_output_keeps_its_type(graph):
    rewriter = GraphRewriter(graph, "p")
    rewriter.rename_output(graph.nodes[0], "a", "gopt.p.a")
    rewriter.rewire(graph.nodes[1], "a", "gopt.p.a")
    rewriter.finish()
    assert graph.types["gopt.p.a"] == TYPE
    assert names(graph)[0] == "gopt.p.a"


def test_a_moved_node_stands_behind_what_it_reads(graph):
    rewriter = GraphRewriter(graph, "p")
    rewriter.move(graph.nodes[2], 0.5)
    rewriter.finish()
    assert names(graph) == ["a", "b", "c"]


def test_a_cycle_is_a_defect_of_the_pass(graph):
    rewriter = GraphRewriter(graph, "p")
    rewriter.rewire(graph.nodes[0], "x", "c")
    with pytest.raises(InvariantError, match="cycle through 'a'"):
        rewriter.finish()
