"""Counts that scatters add to inputs stand apart from what the inputs held."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.ir.load import load
from gopt.ir.opaque.additions import part_additions
from gopt.ir.type_proto import value_info

HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'
COUNTS = {
    "whole numbers": """step ({n}[5] bins, int64[4,1] at, {n}[4] more) => ({n}[5] out)
        {{ out = ScatterND<reduction="add">(bins, at, more) }}""",
    "constants": """step ({n}[5] bins, int64[4,1] at) => ({n}[5] out) <{n}[4] one = {{1, 1, 1, 1}}>
        {{ out = ScatterND<reduction="add">(bins, at, one) }}""",
}


def graph_of(text, folder):
    path = folder / "step.onnx"
    onnx.save(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEAD + text)), path)
    return load(path)


@pytest.mark.parametrize("form, dtype", [("whole numbers", "int64"), ("constants", "int64"), ("constants", "float")])
def test_counts_are_added_to_zeros_first(form, dtype, tmp_path):
    graph = graph_of(COUNTS[form].format(n=dtype), tmp_path)
    parted = part_additions(graph, "gopt.update")
    assert [node.op_type for node in parted.nodes][-2:] == ["ScatterND", "Add"]
    assert parted.file_nodes == graph.nodes and list(parted.outputs) == ["out"]
    values = {"bins": [3, 1, 4, 1, 5], "at": [[1], [4], [1], [0]], "more": [2, 7, 1, 8]}
    kind = np.int64 if dtype == "int64" else np.float32
    fed = {
        name: np.array(value, np.int64 if name == "at" else kind)
        for name, value in values.items()
        if name in graph.inputs
    }
    models = (onnx.load(tmp_path / "step.onnx"), _model(parted))
    before, after = (ReferenceEvaluator(model).run(None, fed)[0] for model in models)
    np.testing.assert_array_equal(before, after)


def _model(graph):
    inputs, outputs = ([value_info(*item) for item in values.items()] for values in (graph.inputs, graph.outputs))
    stored = [each.proto for name, each in graph.initializers.items() if name not in graph.inputs]
    body = onnx.helper.make_graph([node.to_proto() for node in graph.nodes], "parted", inputs, outputs, stored)
    return onnx.helper.make_model(body, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


def test_rows_of_a_gradient_stay_added_to_their_parameter(tmp_path):
    graph = graph_of(COUNTS["whole numbers"].format(n="float"), tmp_path)
    assert part_additions(graph, "gopt.update") is graph


def test_a_histogram_is_summed_over_ranks(tmp_path):
    text = """step (int64[4] at, float[4,3] x, float[3,2] w, int64[5] bins) => (loss, w_new, bins_new)
        <float[3,2] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}, int64[5] bins = {3, 0, 1, 2, 5}, int64[4] one = {1, 1, 1, 1}>
        { h = MatMul(x, w)  s = Mul(h, h)  loss = ReduceMean<keepdims=0>(s)  quarter = Constant<value = float {0.25}>()
          d = Mul(h, quarter)  xt = Transpose<perm=[1, 0]>(x)  g = MatMul(xt, d)  rate = Constant<value = float {0.1}>()
          u = Mul(g, rate)  w_new = Sub(w, u)  bins_new = ScatterElements<reduction="add">(bins, at, one) }"""
    typed = text.replace("(loss, w_new, bins_new)", "(float loss, float[3,2] w_new, int64[5] bins_new)")
    onnx.save(onnx.parser.parse_model(HEAD + typed), tmp_path / "step.onnx")
    step = gopt.shard(gopt.load(tmp_path / "step.onnx", roles=RoleMap(batch=("x", "at"))), "shard=2")
    assert step.program.reductions["bins"].rule == "sum"
    assert gopt.verify(step).outcome == "equal"
