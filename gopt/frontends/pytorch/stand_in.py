"""A small training step with the optimizers of a recipe without values, to show their effect on values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.value_trees import leaves

_LARGEST = 4
"""Elements along each dimension."""


class _Parameters(torch.nn.Module):
    """Parameters with gradients different from each other and from step to step."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], generator: torch.Generator) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(parameters)
        self.slopes = [torch.randn(param.shape, generator=generator).to(param.dtype) for param in parameters]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        terms = [(param * slope + param * param).sum().float() for param, slope in zip(self.all, self.slopes)]
        return torch.stack(terms).sum() * x.mean()


def stand_in(recipe: Recipe) -> Recipe:
    """Return a step of copies of the optimizers over small parameters of the same ranks, types and groups, with random
    values. Existing states of the optimizers begin at zero."""
    generator = torch.Generator().manual_seed(7)
    parameters = list(recipe.whole.parameters())
    small = [
        torch.nn.Parameter(torch.randn(_small(param), generator=generator).to(param.dtype), param.requires_grad)
        for param in parameters
    ]
    memo: dict[int, object] = {id(old): new for old, new in zip(parameters, small)}
    for optimizer in recipe.optimizers:
        for state in optimizer.state.values():
            for _, value in leaves(state):
                if isinstance(value, FakeTensor):
                    memo[id(value)] = torch.zeros(_small(value), dtype=value.dtype)
    copied = copy.deepcopy(recipe, memo)
    return replace(
        copied, module=_Parameters(small, generator), loss=None, batch={"x": torch.ones(2)}, scheduler=None,
        positional=False, form=None,
    )  # fmt: skip


def _small(value: torch.Tensor) -> list[int]:
    return [min(size, _LARGEST) for size in value.shape]
