"""Gradients of derived steps against finite differences of this file's own: the forward in float64 by onnx.reference.

``gopt derive`` confirms its gradients itself; this shares no code with that check.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import NodeProto, TensorProto, numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info
from onnx.reference import ReferenceEvaluator

import gopt

pytest.importorskip("onnx_ad", reason="needs pip install 'gopt[derive]'")

N = make_node
STEP = 2e-3
"""Of a difference: LayerNormalization computes in float32 also here, so a smaller one shows its rounding."""
Shapes = dict[str, tuple[int, ...]]

MODELS: dict[str, tuple[list[NodeProto], Shapes, dict[str, object]]] = {
    "a tied weight": (
        [
            N("MatMul", ["x", "w"], ["a"]), N("Tanh", ["a"], ["t"]), N("Transpose", ["w"], ["wt"], perm=[1, 0]),
            N("MatMul", ["t", "wt"], ["b"]), N("Add", ["b", "x"], ["c"]), N("MatMul", ["c", "v"], ["logits"]),
        ],
        {"w": (6, 6), "v": (6, 3)},
        {},
    ),
    "parts": (
        [
            N("MatMul", ["x", "w"], ["a"]), N("Split", ["a"], ["p", "q"], axis=1, num_outputs=2),
            N("Clip", ["p", "low", "high"], ["pc"]), N("Pow", ["q", "two"], ["qq"]),
            N("Concat", ["pc", "qq"], ["c"], axis=1), N("Slice", ["c", "from", "to", "one"], ["s"]),
            N("Greater", ["s", "zero"], ["m"]), N("Mul", ["s", "high"], ["h"]), N("Where", ["m", "s", "h"], ["l"]),
            N("MatMul", ["l", "v"], ["logits"]),
        ],
        {"w": (6, 8), "v": (6, 3)},
        {"low": -0.5, "high": 0.5, "two": 2.0, "from": [1], "to": [7], "one": [1], "zero": 0.0},
    ),
    "a norm behind a constant weight": (
        [
            N("Identity", ["w"], ["wi"]), N("MatMul", ["x", "wi"], ["a"]), N("Add", ["a", "b"], ["ab"]),
            N("LayerNormalization", ["ab", "g", "bb"], ["l"], axis=-1), N("Gelu", ["l"], ["ge"]),
            N("MatMul", ["ge", "v"], ["logits"]),
        ],
        {"w": (6, 6), "b": (1, 6), "g": (6,), "bb": (6,), "v": (6, 3)},
        {},
    ),
    "roots and sums": (
        [
            N("Einsum", ["x", "w"], ["a"], equation="bi,ij->bj"), N("Mul", ["a", "a"], ["aa"]),
            N("Add", ["aa", "unit"], ["s"]), N("Sqrt", ["s"], ["r"]), N("Div", ["a", "r"], ["d"]),
            N("Reshape", ["d", "cube"], ["k"]), N("ReduceSum", ["k", "last"], ["ks"], keepdims=1),
            N("Sub", ["k", "ks"], ["kk"]), N("Reshape", ["kk", "flat"], ["f"]), N("Softplus", ["f"], ["sp"]),
            N("MatMul", ["sp", "v"], ["logits"]),
        ],
        {"w": (6, 6), "v": (6, 3)},
        {"unit": 1.0, "cube": [4, 2, 3], "last": [2], "flat": [4, 6]},
    ),
    "rows taken twice": (
        [
            N("MatMul", ["x", "w"], ["a"]), N("PRelu", ["a", "slope"], ["p"]), N("HardSwish", ["p"], ["h"]),
            N("CumSum", ["h", "axis"], ["c"]), N("Pad", ["c", "pads"], ["pd"]),
            N("Gather", ["pd", "at"], ["g"], axis=1), N("Tile", ["g", "times"], ["t"]),
            N("MatMul", ["t", "v"], ["logits"]),
        ],
        {"w": (6, 6), "slope": (6,), "v": (8, 3)},
        {"axis": 1, "pads": [0, 1, 0, 1], "at": [0, 2, 2, 5], "times": [1, 2]},
    ),
}  # fmt: skip


def forward(name: str, random: np.random.Generator) -> onnx.ModelProto:
    nodes, weights, constants = MODELS[name]
    stored = [
        numpy_helper.from_array((0.4 * random.standard_normal(shape)).astype("f4"), key)
        for key, shape in weights.items()
    ]
    stored += [
        numpy_helper.from_array(np.array(value, np.float32 if isinstance(value, float) else np.int64), key)
        for key, value in constants.items()
    ]
    x = make_tensor_value_info("x", TensorProto.FLOAT, [4, 6])
    logits = make_tensor_value_info("logits", TensorProto.FLOAT, [4, 3])
    graph = make_graph(nodes, "forward", [x], [logits], stored)
    return make_model(graph, opset_imports=[make_opsetid("", 20)], ir_version=10)


def wide(model: onnx.ModelProto, changed: dict[str, np.ndarray]) -> ReferenceEvaluator:
    """The forward in float64, with other values for some weights."""
    twin = onnx.ModelProto.FromString(model.SerializeToString())
    for each in (*twin.graph.input, *twin.graph.output):
        each.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in twin.graph.initializer:
        value = changed.get(tensor.name, numpy_helper.to_array(tensor))
        kept = value.dtype == np.int64
        tensor.CopyFrom(numpy_helper.from_array(value if kept else value.astype("f8"), tensor.name))
    return ReferenceEvaluator(twin)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    moved = logits - logits.max(1, keepdims=True)
    chosen = moved[np.arange(len(labels)), labels]
    return float((np.log(np.exp(moved).sum(1)) - chosen).mean())


@pytest.mark.parametrize("name", MODELS)
def test_the_update_is_the_rate_times_the_derivative(name: str, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    model = forward(name, random)
    onnx.save(model, tmp_path / "forward.onnx")
    options = gopt.DeriveOptions(loss="cross-entropy", optimizer="sgd")
    gopt.derive(tmp_path / "forward.onnx", tmp_path / "step.onnx", options)
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    x, labels = random.standard_normal((4, 6)).astype("f4"), random.integers(0, 3, 4)
    feeds = {"x": x, "label": labels, "lr": np.array(1, np.float32)}
    made = dict(zip([each.name for each in session.get_outputs()], session.run(None, feeds), strict=True))

    def loss(changed: dict[str, np.ndarray]) -> float:
        return cross_entropy(wide(model, changed).run(None, {"x": x.astype("f8")})[0], labels)

    assert made["loss"] == pytest.approx(loss({}), rel=1e-5)
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    for weight in MODELS[name][1]:
        before = values[weight].astype("f8")
        gradient = before - made[f"{weight}_out"]
        assert np.abs(gradient).max() > 1e-4, weight
        for place in random.permutation(before.size)[:4]:
            ends = []
            for sign in (1, -1):
                moved = before.copy()
                moved.flat[place] += sign * STEP
                ends.append(loss({weight: moved}))
            slope = (ends[0] - ends[1]) / (2 * STEP)
            assert gradient.flat[place] == pytest.approx(slope, rel=1e-3, abs=2e-4 * np.abs(gradient).max()), weight
