"""Linear walks over a graph."""

from small_graphs import chain

from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, ancestors, copied_from, copy_chain, depth, descendants, walk
from gopt.ir.types import TensorType

GRAPH = chain("xa", "ab", "ybc", "yd")


def labels(ids):
    return [node.name for node in GRAPH.nodes if id(node) in ids]


def test_ancestors_are_nodes_and_all_that_they_read():
    nodes, values = ancestors(GraphIndex(GRAPH), ["b"])
    assert labels(nodes) == ["xa", "ab"]
    assert values == {"x", "a", "b"}


def test_descendants_hold_their_sources_and_no_absent_operand():
    assert descendants(GraphIndex(GRAPH), ["y", ""]) == {"y", "c", "d"}
    assert descendants(GraphIndex(GRAPH), ["x"]) == {"x", "a", "b", "c"}


def test_what_a_body_captures_is_followed():
    graph = chain("xa", "yb")
    graph.nodes[1].captures = ("a",)
    assert "b" in descendants(GraphIndex(graph), ["x"])
    assert "x" in ancestors(GraphIndex(graph), ["b"])[1]


def test_depth_counts_the_longest_path():
    assert depth(GraphIndex(GRAPH)) == {"a": 1, "b": 2, "c": 3, "d": 1}


def test_an_index_knows_where_values_are_made():
    index = GraphIndex(GRAPH)
    assert [index.defined_at(name) for name in "xac"] == [-1, 0, 2]
    index.graph.types["s"] = TensorType("float32", (1, 1))
    assert [index.one_element(name) for name in ("s", "x", "unknown")] == [True, False, False]


def test_a_walk_meets_each_value_once_and_looks_no_further_than_it_is_read():
    asked = []

    def following(name):
        asked.append(name)
        return {"a": ["b", "", "c"], "b": ["d"], "c": ["d", "a"]}.get(name, [])

    assert list(walk("a", following)) == ["a", "c", "d", "b"]
    asked.clear()
    assert "c" in walk("a", following)
    assert asked == ["a"]


def test_operands_and_results_are_those_of_the_nodes_around_a_value():
    index = GraphIndex(chain("xya", "ab", "ac"))
    assert list(index.operands("a")) == ["x", "y"]
    assert list(index.operands("a", lambda node: node.name != "xya")) == []
    assert list(index.operands("x")) == []
    assert list(index.results("a")) == ["b", "c"]


def test_a_chain_of_copies_ends_at_the_first_other_operator():
    nodes = [Node("Neg", ["x"], ["a"]), Node("Cast", ["a"], ["b"]), Node("Identity", ["b"], ["c"])]
    producers = {node.outputs[0]: node for node in nodes}
    assert copy_chain(producers, "c") == ["c", "b"]
    assert copy_chain(producers, "c", ("Identity", "Cast")) == ["c", "b", "a"]
    assert copy_chain(producers, "x") == ["x"]
    assert copied_from(GraphIndex(chain("xa")), "a") == "a"
