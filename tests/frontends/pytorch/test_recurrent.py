"""Recurrent layers: dropout between them, and the state that they begin with. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import gopt  # noqa: E402
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


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_state_of_zeros_at_the_start_is_that_of_every_sample(kind, tmp_path):
    """A loss divided by a count of the rank's own batch has one exact rule, and no other note is made."""

    def make():
        layers = kind(3, 4, batch_first=True, bidirectional=True)
        batch = {"x": torch.randn(4, 3, 3), "mask": torch.ones(4, 3)}

        def loss(net, given):
            each = net(given["x"])[0].square().mean(-1)
            return (each * given["mask"]).sum() / given["mask"].sum()

        return layers, loss, torch.optim.SGD(layers.parameters(), 0.1), batch

    export(make, tmp_path / "step.onnx")
    (found,) = gopt.shard(tmp_path / "step.onnx", 2).report().couplings
    assert found.exact.startswith("--loss-reduction weighted:")
    rule = found.exact.removeprefix("--loss-reduction ").split()[0]
    gopt.shard(tmp_path / "step.onnx", 2, loss_reduction=rule).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks").large_batch.outcome.value == "equal"
