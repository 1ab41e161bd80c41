"""The order of an update's states: by how each is updated, whatever the file lists first."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from helpers import FIXTURES
from small_graphs import chain

import gopt
from gopt.analysis.state_order import StateOrder
from gopt.analysis.training import State, StateKind
from gopt.analysis.update_subgraphs import find_updates
from gopt.analysis.updates import UpdateSubgraph
from gopt.ir.graph import Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType


def updates():
    training = gopt.load(FIXTURES / "mlp_adamw.onnx").training
    return training.graph, [*find_updates(training, whole_accumulators=False).subgraphs.values()]


@pytest.mark.parametrize("turned", [False, True])
def test_moments_come_in_one_order_however_they_are_listed(turned):
    graph, subgraphs = updates()
    order = StateOrder(graph)
    for subgraph in subgraphs:
        subgraph.states[1:] = sorted(subgraph.states[1:], key=lambda state: state.tensor, reverse=turned)
        order.sort(subgraph)
        parameter, *moments = [state.tensor for state in subgraph.states]
        assert moments == [f"{parameter}.exp_avg", f"{parameter}.exp_avg_sq"]


def test_equal_updates_are_looked_at_once(monkeypatch):
    """The checksums of the first update serve all others."""
    graph, subgraphs = updates()
    assert len(subgraphs) > 2
    asked = []
    checksum = zlib.crc32
    monkeypatch.setattr("gopt.analysis.state_order.zlib.crc32", lambda data: asked.append(data) or checksum(data))
    order = StateOrder(graph)
    order.sort(subgraphs[0])
    structure = len([data for data in asked if b"[" in data])
    for subgraph in subgraphs[1:]:
        order.sort(subgraph)
    assert structure == len([data for data in asked if b"[" in data]) > 0


@pytest.mark.parametrize("first", ["m", "v"])
def test_states_of_one_depth_are_ordered_by_what_makes_them(first):
    """Where the update reads them first, and what the file lists first, does not matter."""
    made = {"m": Node("Add", ["m", "g"], ["m.new"]), "v": Node("Mul", ["v", "g"], ["v.new"])}
    second = "v" if first == "m" else "m"
    nodes = [made[first], made[second], Node("Sum", ["p", "m.new", "v.new"], ["p.new"])]
    kinds = {"p": StateKind.PARAMETER, "m": StateKind.OPTIMIZER_STATE, "v": StateKind.OPTIMIZER_STATE}
    p, m, v = (State(name, f"{name}.new", kind, "p") for name, kind in kinds.items())
    subgraph = UpdateSubgraph(p, "g", [p, m, v] if first == "m" else [p, v, m], nodes)
    StateOrder(chain("pmvgo")).sort(subgraph)
    assert [state.tensor for state in subgraph.states] == ["p", "m", "v"]


def ordered(nodes, states=("m", "v"), constants=None, kinds=None):
    """The order of states behind the parameter, whatever the file lists first: both ways must agree."""
    graph = chain("pgo")
    for name in states:
        graph.types[name] = TensorType((kinds or {}).get(name, "float32"), (2,))
    graph.initializers |= {name: Tensor(TensorType("float32", value.shape), array=value)
                           for name, value in (constants or {}).items()}  # fmt: skip
    p = State("p", "p.new", StateKind.PARAMETER, "p")
    found = []
    for listed in (states, states[::-1]):
        own = [State(name, f"{name}.new", StateKind.OPTIMIZER_STATE, "p") for name in listed]
        subgraph = UpdateSubgraph(p, "g", [p, *own], nodes)
        StateOrder(graph).sort(subgraph)
        found.append([state.tensor for state in subgraph.states[1:]])
    assert found[0] == found[1]
    return found[0]


def both_ways(*nodes):
    """The same update with the names of its two states exchanged."""
    other = str.maketrans("mv", "vm")
    return nodes, [
        Node(node.op_type, [name.translate(other) for name in node.inputs], [node.outputs[0].translate(other)])
        for node in nodes
    ]


@pytest.mark.parametrize("deep", ["Add", "Mul", "Sub", "Div", "Max"])
def test_a_state_made_by_fewer_operators_comes_first(deep):
    """Whatever their operators are, and whichever is read first."""
    for nodes, wanted in zip(
        both_ways(Node(deep, ["m", "g"], ["m.half"]), Node(deep, ["m.half", "g"], ["m.new"]),
                  Node("Mul", ["v", "g"], ["v.new"])), (["v", "m"], ["m", "v"]),
    ):  # fmt: skip
        assert ordered(list(nodes)) == wanted


def test_small_constants_count_by_value():
    """Two averages differ by their factor alone."""
    small = {"a": np.full(16, 0.5, np.float32), "b": np.full(16, 0.25, np.float32)}
    nodes, exchanged = both_ways(Node("Mul", ["m", "a"], ["m.new"]), Node("Mul", ["v", "b"], ["v.new"]))
    order = ordered(nodes, constants=small)
    assert ordered(nodes[::-1], constants=small) == order
    assert ordered(exchanged, constants=small) == order[::-1]


def test_large_constants_do_not_count():
    """What the update reads first decides."""
    large = {"a": np.full(17, 0.5, np.float32), "b": np.full(17, 0.25, np.float32)}
    nodes = [Node("Mul", ["m", "a"], ["m.new"]), Node("Mul", ["v", "b"], ["v.new"])]
    assert ordered(nodes, constants=large) == ["m", "v"]
    assert ordered(nodes[::-1], constants=large) == ["v", "m"]


def test_constants_in_a_file_are_not_read():
    graph = chain("pgo")
    graph.initializers["a"] = Tensor(TensorType("float32", (2,)), path="/no/such/file")
    p, m, v = (State(name, f"{name}.new", StateKind.OPTIMIZER_STATE, "p") for name in "pmv")
    graph.types |= dict.fromkeys("mv", TensorType("float32", (2,)))
    nodes = [Node("Mul", [name, "a"], [f"{name}.new"]) for name in "vm"]
    subgraph = UpdateSubgraph(p, "g", [p, m, v], nodes)
    StateOrder(graph).sort(subgraph)
    assert [state.tensor for state in subgraph.states] == ["p", "v", "m"]


def test_states_of_another_type_are_told_apart():
    nodes, exchanged = both_ways(Node("Mul", ["m", "g"], ["m.new"]), Node("Mul", ["v", "g"], ["v.new"]))
    kinds = {"m": "float16"}
    order = ordered(nodes, kinds=kinds)
    assert ordered(nodes[::-1], kinds=kinds) == ordered(exchanged, kinds=kinds) == order
    assert ordered(nodes, kinds={"v": "float16"}) == order[::-1]


def test_states_that_look_alike_are_ordered_by_their_first_read():
    """Later reads do not count."""
    nodes = [
        Node("Mul", ["m", "g"], ["m.new"]), Node("Mul", ["v", "g"], ["v.new"]), Node("Add", ["p", "v"], ["p.half"]),
        Node("Add", ["p.half", "m"], ["p.new"]),
    ]  # fmt: skip
    assert ordered(nodes) == ["m", "v"]
    assert ordered([nodes[1], nodes[0], *nodes[2:]]) == ["v", "m"]


def test_results_of_one_operator_keep_their_order():
    assert ordered([Node("Split", ["g"], ["v.new", "m.new"])]) == ["v", "m"]
    assert ordered([Node("Split", ["g"], ["m.new", "v.new"])]) == ["m", "v"]
