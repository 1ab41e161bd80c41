"""Products read transposed operands in place, and give what they gave."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import run_graph
from onnx import helper
from runtime_graphs import make

from gopt.runtime.fold_transposes import fold_transposes

op = helper.make_node
X, W = ("float32", [3, 4]), ("float32", [5, 4])


def transpose(name: str, **given: object):
    return op("Transpose", [name], [name + "t"], **given)


@pytest.mark.parametrize(
    ("nodes", "shape", "left"),
    [
        ([transpose("w"), op("MatMul", ["x", "wt"], ["y"])], [3, 5], []),
        ([transpose("x", perm=[1, 0]), transpose("w"), op("Gemm", ["xt", "wt"], ["y"], transA=1)], [3, 5], []),
        ([transpose("w", perm=[0, 1]), op("MatMul", ["x", "wt"], ["y"])], None, ["Transpose"]),
        ([transpose("w"), op("MatMul", ["x", "wt"], ["y"]), op("Neg", ["wt"], ["kept"])], [3, 5], ["Transpose"]),
    ],
)  # fmt: skip
def test_a_transposed_operand_is_read_in_place(nodes, shape, left, tmp_path):
    w = W if shape is not None else ("float32", [4, 5])
    outputs = {"y": ("float32", shape or [3, 5])} | ({"kept": ("float32", [4, 5])} if len(nodes) == 3 and left else {})
    values = {"xt": ("float32", [4, 3]), "wt": ("float32", [4, 5])}
    graph = make(tmp_path, nodes, {"x": X, "w": w}, outputs, values=values)
    folded = fold_transposes(graph)
    reads = {name for node in folded.nodes for name in node.inputs}
    assert [node.op_type for node in folded.nodes if node.is_a("Transpose") and node.outputs[0] in reads] == left
    generator = np.random.default_rng(0)
    feeds = {"x": generator.standard_normal((3, 4)).astype("f4"), "w": generator.standard_normal(w[1]).astype("f4")}
    plain, same = run_graph(graph, feeds), run_graph(folded, feeds)
    for name, value in plain.items():
        np.testing.assert_allclose(same[name], value, rtol=1e-6)


def test_batches_are_swapped_in_their_last_two_axes_alone(tmp_path):
    nodes = [op("Transpose", ["x"], ["xt"], perm=[0, 2, 1]), op("MatMul", ["xt", "x"], ["y"]),
             op("Transpose", ["x"], ["xr"], perm=[2, 1, 0]), op("MatMul", ["xr", "v"], ["z"])]  # fmt: skip
    cube = ("float32", [2, 3, 4])
    graph = make(tmp_path, nodes, {"x": cube, "v": ("float32", [4, 2, 2])},
                 {"y": ("float32", [2, 4, 4]), "z": ("float32", [4, 3, 2])},
                 values={"xt": ("float32", [2, 4, 3]), "xr": ("float32", [4, 3, 2])})  # fmt: skip
    folded = fold_transposes(graph)
    assert [node.op_type for node in folded.nodes] == ["Transpose", "FusedMatMul", "Transpose", "MatMul"]
    generator = np.random.default_rng(0)
    feeds = {"x": generator.standard_normal((2, 3, 4)).astype("f4"),
             "v": generator.standard_normal((4, 2, 2)).astype("f4")}  # fmt: skip
    expected = np.matmul(feeds["x"].transpose(0, 2, 1), feeds["x"])
    np.testing.assert_allclose(run_graph(folded, feeds)["y"], expected, rtol=1e-5)


def test_vectors_and_other_types_are_left_alone(tmp_path):
    double = ("float64", [3, 4])
    nodes = [transpose("w"), op("MatMul", ["v", "wt"], ["y"]), transpose("d"), op("MatMul", ["d", "dt"], ["z"])]
    graph = make(tmp_path, nodes, {"w": W, "v": ("float32", [4]), "d": double},
                 {"y": ("float32", [5]), "z": ("float64", [3, 3])},
                 values={"wt": ("float32", [4, 5]), "dt": ("float64", [4, 3])})  # fmt: skip
    assert fold_transposes(graph) is graph


def test_products_over_nothing_are_left_alone(tmp_path):
    """The runtime's product leaves all matrices but the first as it finds them."""
    nodes = [op("Transpose", ["x"], ["xt"], perm=[0, 2, 1]), op("MatMul", ["xt", "v"], ["y"])]
    given = {"x": ("float32", [2, 0, 3]), "v": ("float32", [2, 0, 4])}
    graph = make(tmp_path, nodes, given, {"y": ("float32", [2, 3, 4])})
    assert fold_transposes(graph) is graph
