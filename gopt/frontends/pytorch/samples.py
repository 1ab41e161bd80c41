"""The samples of an example batch: the places in its inputs, and the batch with another number of samples."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from gopt.analysis.coupling.marks import Mark, Relation
from gopt.analysis.coupling.samples_axis import Columns
from gopt.errors import OptionError
from gopt.frontends.pytorch.factory import Recipe
from gopt.ir.types import TensorType

ROWS = Mark(Relation.SAMPLES)
"""Dimension 0 has the samples."""
_EXACT = 1e-9
"""Times the loss: rounding in float64."""
Sampled = Mapping[str, Mark]
"""Input with samples -> the place of the samples."""


def resized(batch: Mapping[str, torch.Tensor], size: int, sampled: Sampled) -> dict[str, torch.Tensor]:
    """Return the batch with ``size`` samples, taken in turn."""
    return _taken(batch, torch.arange(size) % samples_of(batch, sampled), sampled)


def _taken(batch: Mapping[str, torch.Tensor], rows: torch.Tensor, sampled: Sampled) -> dict[str, torch.Tensor]:
    def part(value: torch.Tensor, mark: Mark) -> torch.Tensor:
        apart = value.unflatten(mark.axis, (mark.outer, -1))
        return apart.index_select(mark.axis + 1, rows).flatten(mark.axis, mark.axis + 1)

    return {name: part(value, sampled[name]) if name in sampled else value for name, value in batch.items()}


def samples_of(batch: Mapping[str, torch.Tensor], sampled: Sampled | None = None) -> int:
    """Return the number of samples of a batch; by default dimension 0 of the first non-scalar input.

    Raises OptionError for a batch of fewer than two samples, which does not show the inputs with samples.
    """
    marks = sampled or {name: ROWS for name, value in batch.items() if value.dim()}
    name, mark = next(iter(marks.items()), ("", ROWS))
    samples = batch[name].shape[mark.axis] // mark.outer if marks else 0
    if samples < 2:
        raise OptionError(
            "--dynamic batch needs an example batch of at least two samples", "give the factory's batch more rows"
        )
    return samples


def of_one_size(batch: Mapping[str, torch.Tensor]) -> dict[str, Mark]:
    """Return the inputs with the number of samples as dimension 0, perhaps by chance."""
    samples = samples_of(batch)
    return {name: ROWS for name, value in batch.items() if value.dim() and value.shape[0] == samples}


def behind_time(recipe: Recipe) -> Sampled:
    """Return the inputs of a batch with samples along dimension 1, if any: the loss is the same in any order of
    columns, and not in any order of rows."""
    columns = Columns.of({
        name: TensorType(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in recipe.batch.items()
    })  # fmt: skip
    if not columns.marks:
        return {}
    copied = copy.deepcopy(recipe)
    batch = {name: value.double() if value.is_floating_point() else value for name, value in copied.batch.items()}

    def loss(sampled: Sampled) -> float:
        with torch.no_grad():
            return float(copied.loss_of(_taken(batch, torch.arange(samples_of(batch, sampled)).roll(1), sampled)))

    try:
        copied.whole.double().eval()
        plain, rows, columns_turned = map(loss, ({}, of_one_size(batch), columns.marks))
    except Exception:  # whatever eager code raises in another order or precision
        return {}
    near = _EXACT * abs(plain)
    return columns.marks if abs(columns_turned - plain) <= near < abs(rows - plain) else {}


def dimensions(recipe: Recipe) -> list[int]:
    """Return the dimensions of parameters, buffers, and inputs: a check at a traced size would show nothing."""
    values = (*recipe.whole.parameters(), *recipe.whole.buffers(), *recipe.batch.values())
    return [size for value in values for size in value.shape]
