"""A node as rules see it: types, constants that the graph holds, the operator set."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from members import graph_of

from gopt.ir.graph import Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType
from gopt.tensor_parallel.operators import LARGEST, Constants, operator


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"value": onnx.numpy_helper.from_array(np.array([1, 2]))}, np.array([1, 2])),
        ({"value_ints": [1, 2]}, np.array([1, 2])),
        ({"value_int": 3}, np.array(3)),
        ({"value_float": 0.5}, np.array(0.5, np.float32)),
        ({"value_strings": ["a"]}, None),
    ],
)
def test_constants_are_read(attributes, expected):
    graph = graph_of([Node("Constant", [], ["c"], attributes=attributes)], {}, 20)
    found = Constants(graph).get("c")
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found.dtype == expected.dtype
        assert (found == expected).all()


def test_what_is_large_or_made_is_no_constant():
    graph = graph_of([Node("Relu", ["x"], ["y"])], {"x": np.zeros(3)}, 20)
    for size in (LARGEST, LARGEST + 1):
        graph.initializers["c"] = Tensor(TensorType("int64", (size,)), array=np.zeros(size, np.int64))
        assert (Constants(graph).get("c") is None) == (size > LARGEST)
    assert Constants(graph).get("y") is None


def test_an_operator_knows_its_set_and_what_is_absent():
    node = Node("Clip", ["x", "", "c"], ["y"])
    graph = graph_of([node], {"x": np.zeros((3, 5)), "y": np.zeros((3, 5)), "c": np.zeros(())}, 17)
    graph.initializers["c"] = Tensor(TensorType("float64", ()), array=np.array(0.5))
    found = operator(node, graph, Constants(graph))
    assert found.opset == 17
    assert [found.has(place) for place in range(4)] == [True, False, True, False]
    assert [found.rank(place) for place in range(4)] == [2, 0, 0, 0]
    assert [found.constant(place) for place in (0, 1, 3)] == [None] * 3
    assert found.constant(2) == 0.5
