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
    """How optimizers are traced. ``apart``: those whose first step is traced apart. ``lists``: whether third-party ones
    choose themselves between lists of tensors and one tensor after the other."""

    apart: frozenset[int] = frozenset()
    lists: bool = False


def chooses_lists(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a third-party optimizer may work on lists of tensors (``torch._foreach_...``)."""
    options = [*optimizer.param_groups, vars(optimizer)]
    theirs = type(optimizer).__module__.startswith("torch.optim")
    return not theirs and any(each.get("foreach", False) is not False for each in options)


def started(index: int) -> str:
    """The name of the state that counts the steps of an optimizer whose first step is apart."""
    return f"optimizer{index}.started"


def run_optimizers(
    recipe: Recipe, places: Sequence[Place], seen: EagerSteps, way: OptimizerTracing, absent: set[str],
    values: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Update every place, and return the new value of each.

    ``absent``: names of places that the user's optimizers do not hold yet.
    """
    first: dict[str, torch.Tensor] = {}
    for index in sorted(way.apart):
        own = [each for each in places if each.owner == index]
        first |= _first_step(recipe.optimizers[index], own, absent)
    store_others(recipe, seen)
    for optimizer in recipe.optimizers:
        _run(optimizer, places)
    new = {each.name: each.current.detach().to(each.value.dtype) for each in places}
    for place in places:
        if place.name in first:
            assert place.owner is not None
            was = values[started(place.owner)] == 0
            new[place.name] = torch.where(was, first[place.name].to(place.value.dtype), new[place.name])
    return new


def _run(optimizer: torch.optim.Optimizer, places: Sequence[Place]) -> None:
    counted = [each.current for each in places if each.number]
    with no_reads(type(optimizer).__name__), PythonNumbers(counted):
        optimizer.step()


def _first_step(optimizer: torch.optim.Optimizer, own: Sequence[Place], absent: set[str]) -> dict[str, torch.Tensor]:
    """The new value of each of the optimizer's ``own`` places in its first step; all are as before at the end."""
    before = {each.name: each.current.detach().clone() for each in own}
    gradients = {each.name: _gradient(each) for each in own if each.kind is StateForm.PARAMETER}
    for place in own:
        if place.name in absent:
            place.write(None)
    _run(optimizer, [each for each in own if each.name not in absent])
    first = {each.name: each.current.detach().clone() for each in own}
    for place in own:
        parameter = place.read()
        if place.kind is not StateForm.PARAMETER:
            place.write(before[place.name])
        elif parameter is not None:
            with torch.no_grad():
                parameter.copy_(before[place.name])
            parameter.grad = gradients[place.name]
    return first


def _gradient(place: Place) -> torch.Tensor | None:
    parameter = place.read()
    return None if parameter is None or parameter.grad is None else parameter.grad.clone()
