"""A node as rules see it: types, constants that the graph holds, the operator set."""

from __future__ import annotations

import numpy as np
from members import graph_of

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Node
from gopt.ir.operator_use import use_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType


def test_an_operator_knows_its_set_and_what_is_absent():
    node = Node("Clip", ["x", "", "c"], ["y"])
    graph = graph_of([node], {"x": np.zeros((3, 5)), "y": np.zeros((3, 5)), "c": np.zeros(())}, 17)
    graph.initializers["c"] = Tensor(TensorType("float64", ()), array=np.array(0.5))
    found = use_of(node, graph, Constants(graph))
    assert found.opset == 17
    assert [found.has(place) for place in range(4)] == [True, False, True, False]
    assert [found.rank(place) for place in range(4)] == [2, 0, 0, 0]
    assert [found.constant(place) for place in (0, 1, 3)] == [None] * 3
    assert found.constant(2) == 0.5
