"""Orders in which nodes can run."""

import random

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


def _in_turn(nodes, due):
    """The same order, by looking at all nodes for each place."""
    left, order = [*range(len(nodes))], []
    while left:
        unmade = {name for place in left for name in nodes[place].outputs}
        ready = [place for place in left if unmade.isdisjoint(nodes[place].reads)]
        if not ready:
            break
        order.append(min(ready, key=lambda place: (due[place], place)))
        left.remove(order[-1])
    return [nodes[place] for place in order]


@pytest.mark.parametrize("seed", range(200))
def test_it_is_the_order_of_taking_the_first_due_each_time(seed):
    pick = random.Random(seed)
    made = [[f"v{place}", f"w{place}"][: pick.randint(1, 2)] for place in range(pick.randint(1, 12))]
    known, nodes = ["x"], []
    for outputs in made:
        nodes.append(Node("Sum", pick.choices(known, k=pick.randint(0, 3)), outputs))
        known += outputs
    pick.shuffle(nodes)
    due = [pick.choice([0, 1, 2.5, float("inf"), pick.random() * 12]) for _ in nodes]
    assert topological_sort(nodes, due) == _in_turn(nodes, due)
