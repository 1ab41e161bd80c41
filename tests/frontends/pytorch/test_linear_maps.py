"""Operators whose gradient has no ONNX form of its own: pools, borders, resampling, rows that are scattered. By hand,
``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from gopt.frontends.pytorch.export import export  # noqa: E402

ROWS = torch.tensor([0, 1, 1, 0, 1])[:, None].expand(5, 4)
LINE, PLANE, SPACE = (2, 3, 9), (2, 3, 8, 7), (2, 3, 4, 6, 5)


class Applied(nn.Module):
    """Each function on a parameter of its shape; the loss weighs every element of the result differently."""

    def __init__(self, *given):
        super().__init__()
        self.functions = [function for _, function in given]
        self.values = nn.ParameterList([nn.Parameter(torch.randn(*shape)) for shape, _ in given])

    def forward(self, x):
        found = [function(value) for value, function in zip(self.values, self.functions)]
        return sum((each * torch.linspace(-1, 1, each.numel()).view(each.shape)).sum() for each in found) * x.mean()


def resized(shape, mode, **options):
    return shape, lambda x: F.interpolate(x, mode=mode, **options)


CASES = {
    "means of windows": [
        (LINE, nn.AvgPool1d(3, 2, 1)), (PLANE, nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False)),
        (PLANE, nn.AvgPool2d((2, 3), divisor_override=5)), (SPACE, nn.AvgPool3d(2, padding=1)),
    ],
    "adaptive means": [
        (LINE, nn.AdaptiveAvgPool1d(4)), (PLANE, nn.AdaptiveAvgPool2d((3, 5))), (SPACE, nn.AdaptiveAvgPool3d(3)),
    ],
    "maxima": [
        (LINE, nn.MaxPool1d(3, 2, 1)), (SPACE, nn.MaxPool3d(2)), (PLANE, nn.AdaptiveMaxPool2d((4, 1))),
    ],
    "repeated borders": [
        (LINE, nn.ReplicationPad1d((2, 1))), (PLANE, nn.ReplicationPad2d((1, 2, 0, 3))),
        (SPACE, nn.ReplicationPad3d(1)),
    ],
    "nearest": [resized(shape, "nearest", scale_factor=1.7) for shape in (LINE, PLANE, SPACE)],
    "nearest, exact": [resized(shape, "nearest-exact", size=5) for shape in (LINE, PLANE)],
    "linear": [
        resized(LINE, "linear", scale_factor=1.7), resized(PLANE, "bilinear", scale_factor=1.3),
        resized(PLANE, "bilinear", size=(3, 11), align_corners=True), resized(SPACE, "trilinear", scale_factor=1.5),
    ],
    "means and maxima of scattered rows": [
        ((5, 4), lambda x, how=how, own=own: torch.ones(3, 4).scatter_reduce(0, ROWS, x, how, include_self=own))
        for how in ("sum", "mean", "amax") for own in (True, False)
    ],
    "cubic": [resized(PLANE, "bicubic", scale_factor=1.7)],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_eager_pytorch(name, tmp_path):
    torch.manual_seed(0)
    net = Applied(*CASES[name])
    made = net, None, torch.optim.SGD(net.parameters(), 0.1), {"x": torch.ones(2)}
    assert export(made, tmp_path / "step.onnx").checked
