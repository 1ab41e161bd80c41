"""Gradients that differences between batches cannot tell: they are held against differences of the loss itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from derive_cases import DerivedRun
from onnx import helper

import gopt
from gopt.errors import UnsupportedError
from gopt.frontends.derive import derive as front_end
from gopt.frontends.derive.options import DeriveOptions

BESIDE = """<ir_version: 10, opset_import: ["" : 20]>
beside (float[3, 2] x) => (float loss) <float[3, 2] w = {0.3, -0.5, 0.7, 0.2, -0.9, 0.4}> {
  both = Concat <axis: int = 1> (w, x)
  wave = Sin (both)
  product = Mul (both, wave)
  loss = ReduceMean <keepdims: int = 0> (product)
}"""
"""The gradient by w is the same for every batch, and reads the batch all the same."""
JUMPS = """<ir_version: 10, opset_import: ["" : 20]>
jumps (float[4, 3] x) => (float loss) <float[3, 2] w = {0.3, -0.5, 0.7, 0.2, -0.9, 0.4}> {
  h = MatMul (x, w)
  s = Shrink <lambd: float = 0.2> (h)
  t = Tanh (s)
  loss = ReduceMean <keepdims: int = 0> (t)
}"""
"""Shrink jumps where its operand leaves the band around zero."""
OPTIONS = DeriveOptions(loss="loss", optimizer="sgd", lr=1.0)


@pytest.mark.parametrize("text", [BESIDE, JUMPS], ids=["beside", "jumps"])
def test_it_is_confirmed_by_differences_of_the_loss(text: str, tmp_path: Path):
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS).confirmed == 1


def test_the_gradient_beside_the_batch_is_right(tmp_path: Path):
    onnx.save(onnx.parser.parse_model(BESIDE), tmp_path / "m.onnx")
    gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS)
    run = DerivedRun(tmp_path / "s.onnx")
    w = run.states["w"].astype(np.float64)
    run.run = run.session.run(["w_out"], {"x": np.ones((3, 2), np.float32), "w": run.states["w"]})
    np.testing.assert_allclose(w - run.run[0], (np.sin(w) + w * np.cos(w)) / 12, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", [1.1, -1.0, 0.0])
def test_a_wrong_one_is_refused(factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    true = front_end.write_step

    def planted(*given: object):
        step = true(*given)
        tensor = next(each for each in step.graph.initializers.values() if np.allclose(each.numpy(), 1 / 12))
        tensor.array = np.asarray(factor * tensor.numpy(), np.float32)
        return step

    monkeypatch.setattr(front_end, "write_step", planted)
    onnx.save(onnx.parser.parse_model(BESIDE), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match="'w' is not confirmed"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS)


def test_a_zero_gradient_stays_unconfirmed(tmp_path: Path):
    """Nothing is compared where both are zero on all batches."""
    model = onnx.parser.parse_model(BESIDE.replace("Sin (both)", "Relu (far)"))
    model.graph.node.insert(1, helper.make_node("Sub", ["both", "much"], ["far"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e6, np.float32), "much"))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match="nothing was compared"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", OPTIONS)
