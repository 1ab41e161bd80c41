"""BatchNormalization and Dropout that train, beside formulas in float64."""

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
from gopt.frontends.derive.options import DeriveOptions, Norms

RANDOM = np.random.default_rng(17)
X = RANDOM.standard_normal((4, 3)).astype(np.float32)
TRUE = "true = Constant<value = bool {1}>() "


def written(folder: Path, text: str, weights: dict[str, np.ndarray], outputs: str = "float[4,3] y") -> Path:
    head = '<ir_version: 8, opset_import: ["" : 20]>'
    model = onnx.parser.parse_model(f"{head}\ng (float[4,3] x) => ({outputs}) {{ {text} }}")
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "forward.onnx")
    return folder / "forward.onnx"


def normed() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(4).standard_normal
    values = {name: draw(3).astype(np.float32) for name in ("s", "b", "m", "v")}
    return {"w": draw((3, 3)).astype(np.float32), **values, "v": np.abs(values["v"]) + np.float32(0.1)}


def options(**given: Norms | str) -> DeriveOptions:
    return DeriveOptions(loss="mse", optimizer="sgd", prediction="y", **given)  # type: ignore[arg-type]


def stepped(path: Path, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs of one step; loss without a target beside zeros."""
    session = onnxruntime.InferenceSession(path)
    kinds = {each.name: each for each in session.get_inputs()}
    target = np.zeros(kinds["target"].shape, np.float16 if "16" in kinds["target"].type else np.float32)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, {"target": target, "lr": np.ones((), np.float32), **feeds})))


def in_training(values: dict[str, np.ndarray], unbiased: bool) -> dict[str, np.ndarray]:
    """y and the new statistics, in float64; ``unbiased``: the running variance is PyTorch's, not the standard's."""
    h = X.astype(np.float64) @ values["w"].astype(np.float64)
    mean, var = h.mean(0), h.var(0)
    return {
        "y": (h - mean) / np.sqrt(var + 0.01) * values["s"] + values["b"],
        "m_out": 0.8 * values["m"] + 0.2 * mean,
        "v_out": 0.8 * values["v"] + 0.2 * var * (4 / 3 if unbiased else 1),
    }


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("batchnorm", Norms)
@pytest.mark.parametrize("shown", ["", ", float[3] rm, float[3] rv"])
def test_training_mode_in_the_file(tmp_path: Path, half: bool, batchnorm: Norms, shown: str):
    """With small statistics, and with statistics that are outputs; operands in half precision have other types."""
    values = normed()
    text = "h = MatMul(x, w) y, rm, rv = BatchNormalization<training_mode=1, momentum=0.8, epsilon=0.01>(h, s, b, m, v)"
    stored = {**values, "w": values["w"].astype(np.float16)} if half else values
    outputs = f"{'float16' if half else 'float'}[4,3] y{shown}"
    path = written(
        tmp_path, text.replace("h = MatMul(x", "c = Cast<to=10>(x) h = MatMul(c") if half else text, stored, outputs
    )
    derive(path, tmp_path / "step.onnx", options(batchnorm=batchnorm))
    found, expected = stepped(tmp_path / "step.onnx", x=X), in_training(stored, batchnorm is Norms.TRAIN)
    if shown:
        expected.update(rm=expected["m_out"], rv=expected["v_out"])
    near = 4e-3 if half else 1e-5
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=near, atol=near, err_msg=name)


def test_a_norm_of_two_types_is_kept(tmp_path: Path):
    values = {**normed(), "w": normed()["w"].astype(np.float16)}
    text = "c = Cast<to=10>(x) h = MatMul(c, w) n = BatchNormalization(h, s, b, m, v) y = Cast<to=1>(n)"
    derived = derive(written(tmp_path, text, values), tmp_path / "step.onnx", options())
    assert derived.confirmed == 3


STATISTICS = {
    "a variance of two operators": (
        "n = BatchNormalization(x, s, b, m, v) y = BatchNormalization(n, s, b, b, v)", r"'v' .* two of them"),
    "mean and variance in one": ("y = BatchNormalization(x, s, b, v, v)", r"'v' .* two of them"),
    "a computed mean": ("k = Neg(m) y = BatchNormalization(x, s, b, k, v)", r"'k' .* computed"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_that_are_no_states_are_refused(tmp_path: Path, name: str):
    text, message = STATISTICS[name]
    with pytest.raises(UnsupportedError, match=message) as caught:
        derive(written(tmp_path, text, normed()), tmp_path / "step.onnx", options(batchnorm=Norms.TRAIN))
    assert caught.value.hints and not (tmp_path / "step.onnx").exists()


@pytest.mark.parametrize("ratio", ["r = Constant<value = float {0.25}>()", "r = Constant<value_float = 0.25>()"])
@pytest.mark.parametrize("drops", [False, True])
def test_ratio_and_mode_in_constant_nodes_and_a_mask(tmp_path: Path, ratio: str, drops: bool):
    """As PyTorch's older exporter writes them."""
    text = f"{ratio} {TRUE if drops else ''} h = MatMul(x, w) y, k = Dropout(h, r{', true' if drops else ''})"
    path = written(tmp_path, text, {"w": normed()["w"]}, "float[4,3] y, bool[4,3] k")
    derived = derive(path, tmp_path / "step.onnx", options())
    draw = RANDOM.random((4, 3)).astype(np.float32)
    found = stepped(tmp_path / "step.onnx", x=X, **({"draw_0": draw} if drops else {}))
    mask = draw >= 0.25 if drops else np.ones((4, 3), bool)
    np.testing.assert_array_equal(found["k"], mask)
    np.testing.assert_allclose(found["y"], X @ normed()["w"] * mask / (0.75 if drops else 1), rtol=1e-5)
    assert derived.inputs == ("x", "target", *(["draw_0"] if drops else []), "lr")


def test_a_mode_that_is_an_input_is_refused(tmp_path: Path):
    text = """zero = Constant<value = float {0}>() e = ReduceMax<keepdims=0>(x) t = Less(zero, e)
              h = MatMul(x, w) y = Dropout(h, r, t)"""
    path = written(tmp_path, text, {"w": normed()["w"], "r": np.array(0.5, np.float32)})
    with pytest.raises(UnsupportedError, match="the mode of Dropout 'y' is 't', an input of the model or computed"):
        derive(path, tmp_path / "step.onnx", options())
