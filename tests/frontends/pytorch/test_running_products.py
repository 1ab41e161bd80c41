"""Running products, forward and backward, are those of eager PyTorch. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402

from gopt.frontends.pytorch.export import export  # noqa: E402

PRODUCTS = {
    "of zeros and negatives": lambda y: torch.cumprod(torch.relu(y), 1) + y.cumprod(-1),
    "in place": lambda y: (y * 1).cumprod_(0), "in float64": lambda y: y.cumprod(1, dtype=torch.float64).float(),
    "of one element": lambda y: y[:, :1].cumprod(1) + y, "of integers": lambda y: y * (y > 0).cumprod(1),
    "over rows, and over all": lambda y: y * torch.relu(y).prod(1, keepdim=True) + y.prod(),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_running_products_are_those_of_eager_training(name, tmp_path):
    """Forward and backward; a rectifier gives zeros, by which PyTorch's own gradient does not divide either."""
    found = export(recipes.reshaping(PRODUCTS[name]), tmp_path / "step.onnx")
    assert found.checked.losses == pytest.approx(found.checked.eager_losses, rel=1e-5)
