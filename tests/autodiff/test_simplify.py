"""Graphs made smaller, with the same results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from gopt.artifact.serialize import model_bytes
from gopt.autodiff.repairs import repair_transposed_convolutions
from gopt.autodiff.seed_rules import remove_seed_axis
from gopt.autodiff.shapes import settle_shapes
from gopt.autodiff.simplify import rename, simplify
from gopt.ir.graph import Graph
from gopt.ir.load import load


def graph_of(text: str, folder: Path) -> Graph:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    onnx.save(model, folder / "model.onnx")
    return load(folder / "model.onnx")


def results(graph: Graph, **feeds: np.ndarray) -> list[np.ndarray]:
    return ReferenceEvaluator(onnx.ModelProto.FromString(model_bytes(graph, {}, "", {}))).run(None, feeds)


X = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Identity(x) b = Relu(a) y = Neg(b)", ["Relu", "Neg"]),
        ("a = Relu(x) b = Relu(x) y = Add(a, b)", ["Relu", "Add"]),
        ("a = Transpose<perm=[1,0]>(x) b = Transpose<perm=[1,0]>(a) y = Neg(b)", ["Neg"]),
        ("s = Shape(x) a = Reshape(x, s) y = Neg(a)", ["Neg"]),
        ("i = Constant<value_ints=[0]>() a = Unsqueeze(x, i) b = Squeeze(a, i) y = Neg(b)", ["Neg"]),
        ("one = Constant<value_float=1.0>() a = Mul(x, one) y = Neg(a)", ["Neg"]),
        ("two = Constant<value_float=2.0>() four = Mul(two, two) y = Mul(x, four)", ["Mul"]),
        ("a = Exp(x) y = Neg(x)", ["Neg"]),
        ("a = Sum(x) y = Neg(a)", ["Neg"]),
        ("e = Constant<value_float=1e-8>() a = Add(x, e) y = Neg(a)", ["Add", "Neg"]),
        ("z = Constant<value_float=0.0>() a = Mul(x, z) y = Neg(a)", ["Mul", "Neg"]),
        ("i = Constant<value_ints=[-1]>() j = Constant<value_ints=[-5]>() k = Constant<value_ints=[0]>() "
         "a = Slice(x, i, j, k, i) y = Neg(a)", ["Slice", "Neg"]),
        ("a = RandomUniformLike(x) b = RandomUniformLike(x) y = Sub(a, b)",
         ["RandomUniformLike", "RandomUniformLike", "Sub"]),
        ("y = Identity(x)", ["Identity"]),
    ],
)  # fmt: skip
def test_what_a_graph_becomes(tmp_path: Path, body: str, left: list[str]):
    graph = graph_of(f"g (float[3,4] x) => (float[3,4] y) {{ {body} }}", tmp_path)
    before = None if "Random" in body else results(graph, x=X)
    simplify(graph)
    assert [node.op_type for node in graph.nodes] == left
    if before is not None:
        np.testing.assert_array_equal(results(graph, x=X)[0], before[0])


def test_results_get_other_names_where_nobody_has_them(tmp_path: Path):
    graph = graph_of("g (float[3,4] x) => (float[3,4] y) { a = Exp(x) b = Neg(x) y = Add(a, b) }", tmp_path)
    rename(graph, {"a": "grad", "b": "x", "y": "z"})
    assert [node.outputs for node in graph.nodes] == [["grad"], ["b"], ["y"]]
    np.testing.assert_allclose(results(graph, x=X)[0], np.exp(X) - X, rtol=1e-6)


BACKWARD = """g (float[3,4] x, int64[2] ids, float[4,5] w) => (float[3,4,1] p, float[4,5] q, float[4] r, float[6,4] t)
<float[1] seed = {2.0}, int64[3] wide = {3,4,1}, int64[1] last = {-1}, int64[1] first = {0}, int64[3] rows = {6,4,1},
 int64[6] around = {0,1,0,0,1,0}, int64[1] one = {1}, int64[1] five = {5}, int64[2] flat = {4,5}>
{
  full = Expand (seed, wide)
  lifted = Unsqueeze (x, last)
  p = Mul (lifted, full)
  front = Transpose <perm = [2, 0, 1]> (p)
  product = MatMul (front, w)
  xt = Transpose <perm = [1, 0]> (x)
  adjoint = MatMul (xt, product)
  back = Transpose <perm = [1, 2, 0]> (adjoint)
  q = Reshape (back, flat)
  summed = ReduceSum <keepdims = 0> (p, first)
  r = Squeeze (summed, last)
  table = ConstantOfShape <value = float[1] {0}> (rows)
  padded = Pad (p, around)
  cut = Slice (padded, one, five, one)
  again = Slice (cut, first, two, first)
  index = Unsqueeze (ids, last)
  added = ScatterND <reduction = "add"> (table, index, again)
  joined = Concat <axis = 1> (added, added)
  half = Slice (joined, first, four, one)
  t = Squeeze (half, last)
}"""


def test_the_axis_of_one_element_is_taken_out(tmp_path: Path):
    text = BACKWARD.replace("int64[1] five", "int64[1] two = {2}, int64[1] four = {4}, int64[1] five")
    graph = graph_of(text, tmp_path)
    random = np.random.default_rng(4)
    feeds = {"x": X, "ids": np.array([5, 0]), "w": random.standard_normal((4, 5)).astype(np.float32)}
    before = results(graph, **feeds)
    remove_seed_axis(graph, ["seed"], [])
    simplify(graph)
    for found, expected in zip(results(graph, **feeds), before, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    ranks = {node.op_type: len(graph.types[node.outputs[0]].dims) for node in graph.nodes}
    assert ranks["MatMul"] == ranks["ScatterND"] == ranks["Pad"] == 2
    assert sum(node.is_a("Reshape") for node in graph.nodes) == 5, "for ids, and for each output"


def test_a_dimension_that_only_looks_alike_stays(tmp_path: Path):
    """A seed beside a dimension of one element that another operand fills."""
    text = """g (float[3,1] x, float[3,4] z) => (float[3,4] y) <float[1] seed = {2.0}, int64[2] wide = {3,1}>
    { full = Expand (seed, wide) a = Mul (full, x) y = Mul (a, z) }"""
    graph = graph_of(text, tmp_path)
    feeds = {"x": X[:, :1], "z": X}
    before = results(graph, **feeds)
    remove_seed_axis(graph, ["seed"], [])
    simplify(graph)
    np.testing.assert_allclose(results(graph, **feeds)[0], before[0], rtol=1e-6)


def test_shapes_that_are_computed_are_settled(tmp_path: Path):
    text = """g (float[3,4] x, float[1] seed) => (float y) {
      s = Shape (x) n = Shape (seed) t = Concat <axis = 0> (s, n) z = ConstantOfShape (t) a = Neg (z)
      y = ReduceSum <keepdims = 0> (a) }"""
    graph = graph_of(text, tmp_path)
    graph.types = {name: kind for name, kind in graph.types.items() if name in graph.inputs or name in "sn"}
    graph.types["t"] = graph.types["s"].__class__("int64", (3,))
    settle_shapes(graph)
    assert graph.types["a"].shape == (3, 4, 1)
    assert not any(node.is_a("Shape") for node in graph.nodes)


def test_the_backward_of_a_convolution_pads_where_the_forward_does(tmp_path: Path):
    """Sizes 4 and 5, kernel 3, stride 2, padded in front alone; by hand: each output spreads its kernel."""
    text = """g (float[1,1,2,2] g, float[1,1,3,3] w) => (float[1,1,4,4] y)
    { y = ConvTranspose <strides = [2,2], pads = [1,1,0,0], output_shape = [4,4]> (g, w) }"""
    graph = graph_of(text, tmp_path)
    repair_transposed_convolutions(graph, {"y"})
    assert "output_shape" in graph.nodes[0].attributes, "the user's own stay"
    repair_transposed_convolutions(graph, set())
    assert graph.nodes[0].attributes["output_padding"] == [0, 0]
    random = np.random.default_rng(5)
    g, w = (random.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 2, 2), (1, 1, 3, 3)))
    spread = np.zeros((6, 6), np.float32)
    for i in range(2):
        for j in range(2):
            spread[2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += g[0, 0, i, j] * w[0, 0]
    np.testing.assert_allclose(results(graph, g=g, w=w)[0][0, 0], spread[1:5, 1:5], rtol=1e-5)
