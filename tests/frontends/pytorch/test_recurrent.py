"""Dropout between the layers of RNNs. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.ir.load import load  # noqa: E402


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_dropout_between_the_layers_is_that_of_eager_pytorch(kind, tmp_path):
    def make():
        layers = kind(3, 4, 2, batch_first=True, bidirectional=True, dropout=0.3)
        optimizer = torch.optim.SGD(layers.parameters(), 0.1)
        return layers, lambda net, given: net(given["x"])[0].square().mean(), optimizer, {"x": torch.randn(2, 3, 3)}

    assert export(make, tmp_path / "step.onnx").checked
    assert "draw_0" in load(tmp_path / "step.onnx").inputs, "it draws random numbers"
