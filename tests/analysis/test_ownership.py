"""Whose the values of an update are."""

from small_graphs import chain

from gopt.analysis.ownership import Ownership
from gopt.ir.types import TensorType


def owners_of(graph):
    found = Ownership(graph, {"p": "p", "q": "q"})
    return found, [found.note(node) for node in graph.nodes]


def test_a_value_belongs_to_the_first_owner_of_its_operands():
    found, noted = owners_of(chain("pga", "qab", "xc"))
    assert noted == [["p"], ["q", "p"], []]
    assert (found.full["a"], found.full["b"], "c" in found.full) == ("p", "q", False)


def test_a_reduction_belongs_to_one_parameter_or_to_none():
    graph = chain("ps", "qt", "stu", "sv")
    graph.types.update(dict.fromkeys("stuv", TensorType("float32", ())))
    found, _ = owners_of(graph)
    assert found.reduced == {"s": "p", "t": "q", "u": "", "v": "p"}
    assert found.full == {"p": "p", "q": "q"}


def test_what_a_call_completes_belongs_to_nobody():
    graph = chain("ps", "st")
    graph.types.update(dict.fromkeys("st", TensorType("float32", ())))
    graph.nodes[1].domain = "gopt.comm"
    found, _ = owners_of(graph)
    assert found.reduced == {"s": "p", "t": ""}
