"""Runs the optimizers of a step on traced tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gopt.frontends.pytorch.eager_steps import EagerSteps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.python_numbers import PythonNumbers
from gopt.frontends.pytorch.reads import no_reads
from gopt.frontends.pytorch.states import Place, StateForm, store_others


@dataclass(frozen=True, slots=True)
class OptimizerTracing:
    """The way of tracing optimizers. ``apart``: optimizers with the first step traced apart. ``lists``: whether
    third-party optimizers choose between lists of tensors and single tensors."""

    apart: frozenset[int] = frozenset()
    lists: bool = False


def chooses_lists(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a third-party optimizer may work on lists of tensors (``torch._foreach_...``)."""
    options = [*optimizer.param_groups, vars(optimizer)]
    theirs = type(optimizer).__module__.startswith("torch.optim")
    return not theirs and any(group.get("foreach", False) is not False for group in options)


def started(index: int) -> str:
    """The name of the step counter of an optimizer with a separate first step."""
    return f"optimizer{index}.started"


def run_optimizers(
    recipe: Recipe, cells: Sequence[Place], eager: EagerSteps, way: OptimizerTracing, absent: set[str],
    values: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Update every place, and return the new value of each.

    ``absent``: names of places the user's optimizers do not hold yet.
    """
    started_values: dict[str, torch.Tensor] = {}
    for index in sorted(way.apart):
        owned = [cell for cell in cells if cell.owner == index]
        started_values |= _first_step(recipe.optimizers[index], owned, absent)
    store_others(recipe, eager)
    for optimizer in recipe.optimizers:
        _run(optimizer, cells)
    new = {cell.name: cell.current.detach().to(cell.value.dtype) for cell in cells}
    for state in cells:
        if state.name in started_values:
            assert state.owner is not None
            was = values[started(state.owner)] == 0
            new[state.name] = torch.where(was, started_values[state.name].to(state.value.dtype), new[state.name])
    return new


def _run(optimizer: torch.optim.Optimizer, cells: Sequence[Place]) -> None:
    counted = [cell.current for cell in cells if cell.number]
    with no_reads(type(optimizer).__name__), PythonNumbers(counted):
        optimizer.step()


def _first_step(optimizer: torch.optim.Optimizer, cells: Sequence[Place], absent: set[str]) -> dict[str, torch.Tensor]:
    """The new value of each of the optimizer's cells in its first step; all are restored at the end."""
    before = {cell.name: cell.current.detach().clone() for cell in cells}
    gradients = {cell.name: _gradient(cell) for cell in cells if cell.kind is StateForm.PARAMETER}
    for state in cells:
        if state.name in absent:
            state.write(None)
    _run(optimizer, [cell for cell in cells if cell.name not in absent])
    after = {cell.name: cell.current.detach().clone() for cell in cells}
    for state in cells:
        parameter = state.read()
        if state.kind is not StateForm.PARAMETER:
            state.write(before[state.name])
        elif parameter is not None:
            with torch.no_grad():
                parameter.copy_(before[state.name])
            parameter.grad = gradients[state.name]
    return after


def _gradient(cell: Place) -> torch.Tensor | None:
    parameter = cell.read()
    return None if parameter is None or parameter.grad is None else parameter.grad.clone()
