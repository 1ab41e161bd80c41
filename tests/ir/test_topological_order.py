"""Orders in which nodes can run."""

import pytest

from gopt.errors import InputError
from gopt.ir.graph import Node
from gopt.ir.topological_order import check_order, topological_sort


def chain(*edges):
    """Nodes that each read one value and make one: ``ab`` reads a and makes b."""
    return [Node("Relu", [edge[0]], [edge[1]], name=edge) for edge in edges]


def test_of_the_nodes_that_can_run_the_first_due_runs_first():
    nodes = chain("xa", "ab", "xc", "cd")
    names = [node.name for node in topological_sort(nodes, [3, 1, 0, 2])]
    assert names == ["xc", "cd", "xa", "ab"]


def test_nodes_on_a_cycle_are_left_out():
    assert [node.name for node in topological_sort(chain("xa", "bc", "cb", "bd"), range(4))] == ["xa"]


def test_what_a_body_captures_is_read():
    late, early = chain("xa", "xb")
    late.captures = ("b",)
    assert topological_sort([late, early], [0, 1]) == [early, late]


@pytest.mark.parametrize(
    ("edges", "refusal"),
    [
        (("xa", "qb"), "value 'q' is undefined"),
        (("ab", "ba"), "depends on itself"),
        (("ab", "xa"), "node 'ab' reads value 'a' before a node makes it"),
    ],
)
def test_the_value_in_the_way_is_named(edges, refusal):
    with pytest.raises(InputError, match=refusal):
        check_order(chain(*edges), {"x"})


def test_an_order_that_runs_is_accepted():
    check_order(chain("xa", "ab", "ac"), {"x"})
