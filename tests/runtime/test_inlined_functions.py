"""Functions are written out before an engine sees a graph."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper
from runtime_graphs import alone, make

from gopt.runtime.inlined_functions import inlined

op = helper.make_node


def test_a_graph_without_functions_stays(tmp_path):
    graph = make(tmp_path, [op("Neg", ["x"], ["y"])], {"x": ("float32", [2])}, {"y": ("float32", [2])})
    assert inlined(graph) is graph


def test_no_engine_sees_a_function(tmp_path):
    function = helper.make_function(
        "user", "Twice", ["p"], ["r"], [op("Add", ["p", "p"], ["r"])], [helper.make_opsetid("", 20)]
    )
    nodes = [op("Twice", ["x"], ["t"], domain="user"), op("Cast", ["t"], ["y"], to=TensorProto.FLOAT16)]
    graph = make(
        tmp_path, nodes, {"x": ("float32", [2])}, {"y": ("float16", [2])},
        functions=[function], opsets=[helper.make_opsetid("user", 1)],
    )  # fmt: skip
    program = alone(graph)
    assert [node.op_type for node in program.graph.nodes] == ["Add", "Cast"]
    assert not program.graph.header.functions
    assert program.run({"x": np.array([1, 2], np.float32)})["y"].tolist() == [2, 4]
