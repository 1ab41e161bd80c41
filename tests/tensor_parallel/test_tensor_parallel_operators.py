"""Nodes as rules see them: constants that say something of dimensions."""

from __future__ import annotations

import onnx
import onnx.parser

from gopt.ir.load import load
from gopt.tensor_parallel.operators import LARGEST, Constants, operator

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
step (float[2,3] x) => (float[2] y)
<int64[1] axes = {1}>
{
  one = Constant<value_ints = [1]>()
  z = ReduceSum<keepdims = 0>(x, one)
  w = ReduceSum<keepdims = 0>(x, axes)
  y = Add(z, w)
}
"""


def test_constants_of_nodes_and_of_the_file(tmp_path):
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "step.onnx")
    graph = load(tmp_path / "step.onnx")
    constants = Constants(graph)
    for node in graph.nodes:
        if node.op_type == "ReduceSum":
            seen = operator(node, graph, constants)
            assert seen.constant(1).tolist() == [1]
            assert seen.constant(0) is None and seen.constant(2) is None
            assert seen.operands[0].dims == (2, 3) and seen.results[0].dims == (2,)
    large = next(iter(graph.initializers.values()))
    assert large.type.elements <= LARGEST
