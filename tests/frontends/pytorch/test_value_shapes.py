"""Shapes that depend on values are refused with their line: another batch would have other ones. By hand,
``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402


def step(loss):
    def make():
        net = nn.Linear(4, 3)
        batch = {"x": torch.randn(6, 4), "y": torch.tensor([0, 2, -1, 1, -1, 0])}
        return net, loss, torch.optim.SGD(net.parameters(), 0.1), batch

    return make


def masked_rows(net, batch):
    keep = batch["y"] >= 0
    return F.cross_entropy(net(batch["x"])[keep], batch["y"][keep])


def selected_elements(net, batch):
    found = net(batch["x"])
    return torch.masked_select(found, found > 0).mean()


def rows_of_an_expert(net, batch):
    rows = torch.where(batch["y"] == 0)[0]
    return net(batch["x"][rows]).square().mean()


@pytest.mark.parametrize("loss", [masked_rows, selected_elements, rows_of_an_expert])
def test_rows_that_the_batch_selects_are_refused_with_their_line(loss, tmp_path):
    with pytest.raises(UnsupportedError, match=r"depends on the batch or on states: .*in test_value_shapes.py, line"):
        export(step(loss), tmp_path / "step.onnx")


def test_rows_that_a_constant_selects_are_exported(tmp_path):
    mask = torch.tensor([True, False, True, True, False, True])

    def loss(net, batch):
        return net(batch["x"])[torch.nonzero(mask).flatten()].square().mean()

    assert export(step(loss), tmp_path / "step.onnx").checked
