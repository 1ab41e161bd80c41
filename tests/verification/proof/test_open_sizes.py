"""Operators on values whose batch is open: a law that needs sizes does not apply, and equal nodes are proven equal."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

import gopt

BODIES = (
    "y = Conv<pads=[1,1]>(x, k, b)",
    "y = Conv<pads=[1,1], group=2>(x, g)",
    "y = ConvTranspose(x, g, u)",
    "y = Gather<axis=1>(x, one)",
    "y = Gather<axis=-1>(x, last)",
    "y = Gather<axis=1>(x, two)",
    "y = GatherElements(x, x1)",
    "y = Slice(x, one1, two1, one1)",
    "y, z = Split<axis=1, num_outputs=2>(x)",
    "y = Concat<axis=1>(x, x)",
    "y = Concat<axis=0>(x, x)",
    "y = ReduceSum(x, one1)",
    "y = ReduceSum(x)",
    "y = ReduceMean(x, one1)",
    "y = ReduceMax(x, two1)",
    "y = ReduceL2(x, one1)",
    "y = Softmax<axis=1>(x)",
    "y = LogSoftmax<axis=-1>(x)",
    "y = CumSum(x, axis)",
    "y = MaxPool<kernel_shape=[2]>(x)",
    "y = AveragePool<kernel_shape=[2]>(x)",
    "y = GlobalAveragePool(x)",
    "y = Transpose<perm=[2,0,1]>(x)",
    "y = Reshape(x, rows)",
    "f = Flatten(x) y = Gemm(f, m, b)",
    "y = MatMul(x, q)",
    'y = Einsum<equation="bij,jk->bki">(x, q)',
    "y = Pad(x, pads)",
    "y = Unsqueeze(x, one1)",
    "y = Expand(x, wide)",
    "y = Where(c, x, x)",
    "y = Trilu(x, one)",
    "y = LayerNormalization(x, s)",
    "y = ScatterND(x, places, x2)",
    "y = Clip(x, low)",
    "y = Tile(x, thrice)",
    "n = Shape(x) y = Expand(b1, n)",
)
STORED = {
    "one": "int64 one = {1}",
    "last": "int64 last = {-1}",
    "axis": "int64 axis = {1}",
    "low": "float low = {0}",
    "two": "int64[2] two = {0, 2}",
    "one1": "int64[1] one1 = {1}",
    "two1": "int64[1] two1 = {2}",
    "rows": "int64[2] rows = {-1, 12}",
    "pads": "int64[6] pads = {0, 0, 1, 0, 0, 0}",
    "wide": "int64[3] wide = {1, 1, 3}",
    "thrice": "int64[3] thrice = {1, 3, 1}",
    "places": "int64[1,1] places = {0}",
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("known", [False, True], ids=["open", "known"])
def test_equal_nodes_are_proven(body: str, known: bool, tmp_path: Path) -> None:
    batch = "2" if known else "batch"
    sizes = {
        "x": f"{batch},4,3", "k": "4,4,3", "b": "4", "g": "4,2,3", "u": "2", "m": "12,4", "q": "3,5", "s": "3",
        "x1": "1,4,3", "x2": "1,4,3", "c": f"{batch},4,3", "b1": "1",
    }  # fmt: skip
    types, words = {"x1": "int64", "c": "bool"}, set(re.findall(r"\w+", body))
    names = [name for name in sizes if name in words]
    inputs = ", ".join(f"{types.get(name, 'float')}[{sizes[name]}] {name}" for name in names)
    stored = ", ".join(text for name, text in STORED.items() if name in words)
    text = f'<ir_version: 9, opset_import: ["": 18]> t ({inputs}) => (y) <{stored}> {{ {body} }}'
    model = onnx.parser.parse_model(text)
    del model.graph.output[:]
    model = onnx.shape_inference.infer_shapes(model)
    model.graph.output.extend([each for each in model.graph.value_info if each.name == "y"])
    paths = [tmp_path / f"{name}.onnx" for name in ("source", "rank_0", "rank_1")]
    for path in paths:
        onnx.save(model, path)
    keys = {
        "format": "gopt-relation/1", "forward": True, "mesh": {"tp": 2},
        "inputs": {name: {} for name in names}, "outputs": {"y": {}},
    }  # fmt: skip
    assert gopt.prove(paths[0], ranks=paths[1:], relation=keys).proven
