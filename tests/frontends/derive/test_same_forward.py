"""A step whose forward is another than the model's is refused: its gradients are right, and say nothing about that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from derive_cases import DerivedRun
from onnx import numpy_helper

import gopt
from gopt.autodiff import rewrites
from gopt.errors import UnsupportedError

TEXT = """<ir_version: 10, opset_import: ["" : 20]>
gates (float[3, 2, 5] x) => (float[3, 1, 2, 2] y) {
  y, last = GRU <hidden_size: int = 2, linear_before_reset: int = 1> (x, w, r)
}"""
OPTIONS = gopt.DeriveOptions(loss="mse", optimizer="sgd")


@pytest.fixture
def gates(tmp_path: Path) -> Path:
    model, random = onnx.parser.parse_model(TEXT), np.random.default_rng(0)
    for name, shape in {"w": (1, 6, 5), "r": (1, 6, 2)}.items():
        model.graph.initializer.append(numpy_helper.from_array(random.normal(size=shape).astype(np.float32), name))
    onnx.save(model, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_what_onnx_ad_writes_otherwise_is_refused(gates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """onnx-ad 0.3.0 forgets ``linear_before_reset`` of a GRU without a bias."""
    monkeypatch.setattr(rewrites, "REWRITES", {k: v for k, v in rewrites.REWRITES.items() if k != "GRU"})
    with pytest.raises(UnsupportedError, match=r"with other results: .(loss|y). differs"):
        gopt.derive(gates, tmp_path / "s.onnx", OPTIONS)
    assert not (tmp_path / "s.onnx").exists()


def test_with_a_bias_of_zeros_it_is_right(gates: Path, tmp_path: Path):
    gopt.derive(gates, tmp_path / "s.onnx", OPTIONS)
    x, run = np.random.default_rng(1).normal(size=(3, 2, 5)).astype(np.float32), DerivedRun(tmp_path / "s.onnx")
    wanted = onnx.reference.ReferenceEvaluator(str(gates)).run(None, {"x": x})[0]
    target = np.zeros((3, 1, 2, 2), np.float32)
    assert run.step(x=x, target=target, lr=np.array(0.1, np.float32)) == pytest.approx((wanted**2).mean(), rel=1e-5)
