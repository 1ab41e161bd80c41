"""Gradients of whole models beside PyTorch's, element by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from derive_cases import NAMED_MODELS, RECORDED, DerivedRun

import gopt
from gopt.errors import OptionError
from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.options import DeriveOptions


@pytest.mark.parametrize("name", NAMED_MODELS)
def test_gradients_are_pytorchs_by_name(tmp_path: Path, name: str):
    """With a rate of one the step of SGD is the gradient."""
    recorded = np.load(RECORDED / f"{name}.npz")
    options = DeriveOptions(
        loss="cross-entropy", optimizer="sgd", lr=1.0, class_axis=1 if name == "unet" else None,
        trainable=tuple(key.removeprefix("grad.") for key in recorded if key.startswith("grad.")),
    )  # fmt: skip
    derived = derive(RECORDED / f"{name}.onnx", tmp_path / "step.onnx", options)
    run = DerivedRun(tmp_path / "step.onnx")
    before = dict(run.states)
    assert derived.confirmed == derived.parameters == len(before) == len(recorded.files) - 3
    assert run.step(x=recorded["x"], label=recorded["label"]) == pytest.approx(float(recorded["loss"]), rel=1e-5)
    for key, value in before.items():
        expected = recorded[f"grad.{key}"]
        np.testing.assert_allclose(
            value - run.states[key], expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max() + 1e-7, err_msg=key
        )


@pytest.mark.parametrize("knobs", [{"clip_norm": 0.1}, {"loss_scale": "dynamic"}], ids=str)
def test_parameters_with_dimensions_of_one_element_shard(tmp_path: Path, knobs: dict[str, object]):
    """A depthwise weight is [8, 1, 3, 3]: its second dimension is not onnx-ad's axis of directions."""
    options = DeriveOptions(loss="cross-entropy", optimizer="momentum", **knobs)
    derive(RECORDED / "depthwise.onnx", tmp_path / "step.onnx", options)
    graph = gopt.load(tmp_path / "step.onnx").training.graph
    assert graph.types["depthwise.weight.grad"].shape == (8, 1, 3, 3)
    gopt.shard(tmp_path / "step.onnx", 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks").equal


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMED_MODELS)
def test_recorded_gradients_are_pytorchs_by_name(name: str):
    pytest.importorskip("torch")
    from models_by_torch import gradients

    recorded = np.load(RECORDED / f"{name}.npz")
    for key, value in gradients(name).items():
        np.testing.assert_allclose(value, recorded[key], rtol=1e-4, atol=1e-6, err_msg=key)


def test_an_output_with_the_name_of_a_loss_is_ambiguous(tmp_path: Path):
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[4,3] x) => (float[4,3] y, float mse) '
    model = onnx.parser.parse_model(text + "{ y = MatMul(x, w) mse = ReduceSum<keepdims=0>(y) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((3, 3), np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(OptionError, match="--loss mse is a loss to attach, and the model has an output of that name"):
        derive(tmp_path / "m.onnx", tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    options = DeriveOptions(loss="mse", optimizer="sgd", prediction="y")
    assert "target" in derive(tmp_path / "m.onnx", tmp_path / "step.onnx", options).inputs
