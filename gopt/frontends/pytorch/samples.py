"""The samples of an example batch: the inputs with samples, and the batch with another number of samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from gopt.errors import OptionError
from gopt.frontends.pytorch.factory import Recipe


def resized(batch: Mapping[str, torch.Tensor], size: int, sampled: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the batch with ``size`` samples, taken in turn: dimension 0 of the inputs ``sampled``."""
    rows = torch.arange(size) % samples_of(batch)
    return {name: value[rows] if name in sampled else value for name, value in batch.items()}


def samples_of(batch: Mapping[str, torch.Tensor]) -> int:
    """Return the number of samples of a batch: dimension 0 of the first non-scalar input.

    Raises OptionError for a batch of fewer than two samples, which does not show the inputs with samples.
    """
    tensor = next((value for value in batch.values() if value.dim()), None)
    if tensor is None or tensor.shape[0] < 2:
        raise OptionError(
            "--dynamic batch needs an example batch of at least two samples", "give the factory's batch more rows"
        )
    return int(tensor.shape[0])


def of_one_size(batch: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the inputs with the number of samples as dimension 0, perhaps by chance."""
    samples = samples_of(batch)
    return tuple(name for name, value in batch.items() if value.dim() and value.shape[0] == samples)


def dimensions(recipe: Recipe) -> list[int]:
    """Return the dimensions of parameters, buffers, and inputs, with the example's number of samples: a check at a
    traced size would show nothing."""
    values = (*recipe.whole.parameters(), *recipe.whole.buffers(), *recipe.batch.values())
    return [samples_of(recipe.batch), *(size for value in values for size in value.shape)]
