"""Whether a graph is sound."""

import pytest

from gopt.errors import InvariantError
from gopt.ir.def_use_check import check_graph
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType

TYPE = TensorType("float32", (2,))


def graph(*edges, output="b"):
    nodes = [Node("Relu", [old], [new]) for old, new in edges]
    return Graph("g", nodes, {"x": TYPE}, {output: TYPE}, {}, {}, None)


def test_reads_are_counted():
    assert check_graph(graph("xa", "ab")) == 2


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (graph("ab", "xa"), "reads 'a', which nothing makes before it"),
        (graph("xb", "xb"), "'b' is made twice"),
        (graph("xx"), "'x' is made twice"),
        (graph("xa", output="q"), "output 'q' is made by nothing"),
    ],
)
def test_the_first_fault_is_named(broken, fault):
    with pytest.raises(InvariantError, match=fault):
        check_graph(broken)
