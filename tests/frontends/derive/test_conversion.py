"""Older operator sets whose conversion changes results: mended, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from onnx import numpy_helper

from gopt.errors import UnsupportedError
from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.options import DeriveOptions

DRAW = np.random.default_rng(31).standard_normal
X = DRAW((2, 3, 4)).astype(np.float32)


def written(folder: Path, opset: int, text: str, **weights: np.ndarray) -> Path:
    head = f'<ir_version: 7, opset_import: ["" : {opset}]>'
    model = onnx.parser.parse_model(f"{head}\ng (float[2,3,4] x) => (float[a,b,c,d] y) {{ h = MatMul(x, w) {text} }}")
    weights["w"] = DRAW((4, 4)).astype(np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.save(model, folder / "forward.onnx")
    return folder / "forward.onnx"


@pytest.mark.parametrize("mode", ["linear", "nearest"])
@pytest.mark.parametrize(("opset", "operator"), [(9, "Upsample"), (10, "Resize")])
@pytest.mark.parametrize("last", ["y = Identity(q)", "y = Relu(q)"])
def test_older_resizes_have_no_half_pixels(tmp_path: Path, opset: int, operator: str, mode: str, last: str):
    text = f'u = Unsqueeze<axes=[1]>(h) q = {operator}<mode="{mode}">(u, s) {last}'
    path = written(tmp_path, opset, text, s=np.array([1, 1, 2, 2.5], np.float32))
    derive(path, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    (expected,) = onnxruntime.InferenceSession(path).run(["y"], {"x": X})
    feeds = {"x": X, "target": np.zeros_like(expected), "lr": np.ones((), np.float32)}
    (found,) = onnxruntime.InferenceSession(tmp_path / "step.onnx").run(["y"], feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_conversion_with_other_results_is_refused(tmp_path: Path):
    """An older Hardmax has one largest element in a whole sample, and the converter forgets it."""
    path = written(tmp_path, 12, "m = Hardmax(h) k = Mul(h, m) u = Unsqueeze<axes=[1]>(k) y = Identity(u)")
    with pytest.raises(UnsupportedError, match="from operator set 12 to 20 with other results: 'y' differs") as caught:
        derive(path, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    assert caught.value.hints and not (tmp_path / "step.onnx").exists()


def test_random_numbers_are_no_other_results(tmp_path: Path):
    """They are refused where they reach the loss; here they do not."""
    text = "u = Unsqueeze<axes=[1]>(h) y = Identity(u)"
    path = written(tmp_path, 12, text)
    model = onnx.load(path)
    model.graph.node.append(onnx.helper.make_node("RandomNormalLike", ["x"], ["noise"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("noise", onnx.TensorProto.FLOAT, [2, 3, 4]))
    onnx.save(model, path)
    options = DeriveOptions(loss="mse", optimizer="sgd", prediction="y")
    assert derive(path, tmp_path / "step.onnx", options).confirmed == 1


def test_what_cannot_be_run_is_not_supported(tmp_path: Path):
    """A mode of Resize that is in operator sets 11 and 12 alone: exit code 4, not that of a run."""
    mode = 'mode="linear", coordinate_transformation_mode="tf_half_pixel_for_nn"'
    path = written(
        tmp_path, 12, f"u = Unsqueeze<axes=[1]>(h) q = Resize<{mode}>(u, r, s) y = Identity(q)",
        r=np.zeros(0, np.float32), s=np.array([1, 1, 2, 1.5], np.float32),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="cannot be confirmed by finite differences: Resize 'q'") as caught:
        derive(path, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    assert caught.value.exit_code == 4 and caught.value.hints


POOLS = {
    "last window": "p = MaxPool<ceil_mode=1, kernel_shape=[1, 1], strides=[2, 2]>(u)",
    "behind another": """o = AveragePool<ceil_mode=1, kernel_shape=[1, 2], strides=[1, 1]>(u)
        q = LpPool<ceil_mode=1, kernel_shape=[1, 1], strides=[2, 2]>(o)
        p = AveragePool<ceil_mode=1, kernel_shape=[1, 1], strides=[2, 2], pads=[0, 0, 0, 0]>(q)""",
    "its pads": "p = MaxPool<ceil_mode=1, kernel_shape=[2, 2], strides=[2, 3], pads=[1, 1, 1, 1]>(u)",
    "pads count": """p = AveragePool<ceil_mode=1, count_include_pad=1, kernel_shape=[2, 2], strides=[2, 3],
        pads=[1, 1, 1, 1]>(u)""",
}
"""The last window begins behind the input: onnx counts it before operator set 22, ONNX Runtime does not."""


@pytest.mark.parametrize("pool", POOLS)
def test_a_window_of_a_pool_that_begins_behind_the_input_is_none(tmp_path: Path, pool: str):
    text = f"u = Unsqueeze(h, k) {POOLS[pool]} a = ReduceMean<keepdims=0>(p) y = Expand(a, s)"
    path = written(tmp_path, 18, text, k=np.array([1]), s=np.array([1, 1, 1, 1]))
    derive(path, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    (expected,) = onnxruntime.InferenceSession(path).run(["y"], {"x": X})
    feeds = {"x": X, "target": np.zeros_like(expected), "lr": np.ones((), np.float32)}
    (found,) = onnxruntime.InferenceSession(tmp_path / "step.onnx").run(["y"], feeds)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_such_a_window_that_no_pads_express_is_refused_by_name(tmp_path: Path):
    """The mean over declared pads, with elements that ceil_mode adds, which never count."""
    pool = "AveragePool<ceil_mode=1, count_include_pad=1, kernel_shape=[3, 1], strides=[2, 2], pads=[1, 0, 0, 0]>"
    path = written(tmp_path, 18, f"u = Unsqueeze(h, k) y = {pool}(u)", k=np.array([1]))
    with pytest.raises(UnsupportedError, match="AveragePool 'y' has a window by ceil_mode") as caught:
        derive(path, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    assert caught.value.hints
