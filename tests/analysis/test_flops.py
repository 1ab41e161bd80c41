"""Floating-point operations of products and convolutions, counted by hand and by loops over their definition."""

from __future__ import annotations

from math import prod

import onnx
import pytest
from onnx import TensorProto, helper
from recipes import Recipe, build

import gopt
from gopt.analysis.flops import flops
from gopt.ir.load import graph_of


def graph(op_type, shapes, out, **attributes):
    names = ["a", "b", "c"][: len(shapes)]
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in zip(names, shapes)]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, out)]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 20)]
    )
    return graph_of(model)


@pytest.mark.parametrize(
    ("op_type", "shapes", "out", "attributes", "terms"),
    [
        ("MatMul", [[5, 2, 3], [3, 7]], [5, 2, 7], {}, 5 * 2 * 7 * 3),
        ("MatMul", [[3], [3, 7]], [7], {}, 7 * 3),
        ("Gemm", [[3, 2], [3, 7], [7]], [2, 7], {"transA": 1}, 2 * 7 * 3),
        ("Gemm", [[2, 3], [7, 3]], [2, 7], {"transB": 1}, 2 * 7 * 3),
        ("Conv", [[2, 4, 9, 9], [6, 2, 3, 3]], [2, 6, 7, 7], {"group": 2}, 2 * 6 * 7 * 7 * 2 * 9),
        ("ConvTranspose", [[2, 4, 5, 5], [4, 3, 2, 2]], [2, 6, 6, 6], {"group": 2}, 2 * 4 * 5 * 5 * 3 * 4),
        ("Einsum", [[2, 3, 4], [2, 5, 4]], [2, 3, 5], {"equation": "bij,bkj->bik"}, 2 * 3 * 4 * 5),
        ("Add", [[2, 3], [2, 3]], [2, 3], {}, 0),
    ],
)
def test_a_node_counts_a_multiplication_and_an_addition_for_each_term(op_type, shapes, out, attributes, terms):
    assert flops(graph(op_type, shapes, out, **attributes)) == 2 * terms


def test_a_step_takes_three_times_its_forward_without_the_gradient_of_its_input(tmp_path):
    path = tmp_path / "step.onnx"
    onnx.save(build(Recipe(widths=(3, 6, 4))), path)
    source = gopt.load(path).training.graph
    samples = source.inputs["x"].dims[0]
    layers = [samples * prod(each) for each in ((3, 6), (6, 4))]
    assert flops(source) == 2 * (3 * sum(layers) - layers[0])
