"""From logical to local types: shapes that operators name, and shapes that they ask for."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

from gopt.ir.load import load
from gopt.records.placements import Shard, Sharding
from gopt.tensor_parallel.localise import localise

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
step (float[4,12] x) => (float[4,3,4] a, float[2,4,12] b, float[4,6] c, float[4,6] d, int64[2] e, int64 n)
<int64[3] to = {4, 3, 4}, int64[3] wide = {2, 4, 12}, int64[2] parts = {6, 6}>
{
  a = Reshape(x, to)
  b = Expand(x, wide)
  c, d = Split<axis = 1>(x, parts)
  e = Shape(x)
  n = Size(x)
}
"""


def local(tmp_path, member: int):
    onnx.save(onnx.parser.parse_model(TEXT), tmp_path / "step.onnx")
    graph = load(tmp_path / "step.onnx")
    along = {
        "x": Shard(0, (3, 1)), "a": Shard(0, (3, 1)), "b": Shard(1, (3, 1)), "c": Shard(0, (3, 1)),
        "d": Shard(0, (3, 1)),
    }  # fmt: skip
    localise(graph, {name: Sharding.along("tp", place) for name, place in along.items()}, {"tp": member})
    return graph


@pytest.mark.parametrize(("member", "rows"), [(0, 3), (1, 1)])
def test_shapes_are_those_of_the_member(tmp_path, member, rows):
    graph = local(tmp_path, member)
    assert graph.types["x"].dims == graph.inputs["x"].dims == (rows, 12)
    assert graph.types["b"].dims == graph.outputs["b"].dims == (2, rows, 12)
    named = {node.op_type: graph.initializers[node.inputs[1]].numpy().tolist() for node in graph.nodes[:3]}
    assert named == {"Reshape": [rows, 3, 4], "Expand": [2, rows, 12], "Split": [6, 6]}


def test_the_shape_of_the_whole_value_is_kept(tmp_path):
    graph = local(tmp_path, 1)
    made = {node.outputs[0]: node for node in graph.nodes}
    assert made["e"].op_type == made["n"].op_type == "Constant"
    assert onnx.numpy_helper.to_array(made["e"].attributes["value"]).tolist() == [4, 12]
    assert onnx.numpy_helper.to_array(made["n"].attributes["value"]) == np.int64(48)
