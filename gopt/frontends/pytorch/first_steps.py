"""Optimizers with a different first step, which stores gradients or uses another rule. Values stored in the first eager
step count as values before the step.

This is wrong if values depend on gradients, and if the optimizer recognises its first step by a missing state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.eager import EagerTraining
from gopt.frontends.pytorch.eager_code import on_attention_math
from gopt.frontends.pytorch.eager_steps import EagerSteps, eager_steps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.options import ExportOptions
from gopt.frontends.pytorch.randomness import RecordedDraws, ReplayedDraws
from gopt.frontends.pytorch.stand_in import stand_in
from gopt.frontends.pytorch.states import Place, StateForm, find_places, store_others
from gopt.text.sanitize import show

_SHARE, _ROUNDING = 1e-4, 1e-6
"""Differences of rounding: as a share of a state's change, and of its norm."""


def first_steps_apart(recipe: Recipe, eager: EagerSteps, draws: Sequence[torch.Tensor]) -> frozenset[int]:
    """The indices of optimizers whose first step differs from a step from the first values of the states.

    ``draws``: the random numbers of the step behind ``eager``. Both steps get the same gradients, other than in that
    step. Without values, small parameters replace the recipe's.
    """
    if any(isinstance(parameter, FakeTensor) for parameter in recipe.whole.parameters()):
        recipe, eager, draws = _with_values(recipe)
    plain, stored = copy.deepcopy(recipe), copy.deepcopy(recipe)
    cells, stored_cells = _places(plain, eager), _places(stored, eager)
    start = {cell.name: cell.value.detach().clone() for cell in cells}
    for state in stored_cells:
        if state.kind is StateForm.OPTIMIZER and state.read() is None:
            state.store()
    store_others(stored, eager)
    numbers = ReplayedDraws(draws)
    with on_attention_math(), numbers:
        plain.loss_of(plain.batch).backward()
    generator = torch.Generator().manual_seed(3)
    for state, twin_cell in zip(cells, stored_cells):
        value, twin = state.read(), twin_cell.read()
        if state.kind is StateForm.PARAMETER and value is not None and value.grad is not None and twin is not None:
            value.grad *= 1 + torch.randn(value.shape, generator=generator).to(value.dtype) / 2
            twin.grad = value.grad.clone()
    offset = numbers.taken
    _step(plain, draws[offset:])
    try:
        _step(stored, draws[offset:])
    except Exception:  # the trace meets the same error, and reports it
        return frozenset()
    changed = next((cell for cell in cells if cell.current.shape != start[cell.name].shape), None)
    if changed is not None:
        old, new = list(start[changed.name].shape), list(changed.current.shape)
        text, hint = "the optimizer changes the shape of its state", "a state of a graph has one shape in all steps"
        if changed.owner is None:
            text = "the module changes the shape of its buffer"
            hint += ": call the module once on a batch before the export, if it makes the buffer there"
        raise UnsupportedError(f"{text} {show(changed.name)}: {old} becomes {new}", hint)
    return frozenset(
        cell.owner
        for cell, stored in zip(cells, stored_cells)
        if cell.owner is not None and not _same(cell.current, stored.current, start[cell.name])
    )


def _with_values(recipe: Recipe) -> tuple[Recipe, EagerSteps, list[torch.Tensor]]:
    """A small recipe with the same optimizers, its first step's stored values and random numbers."""
    recorded = RecordedDraws(0)

    def run(tried: Recipe, numbers: RecordedDraws) -> None:
        with numbers:
            EagerTraining(tried, ExportOptions()).step(tried.batch)

    try:
        small = stand_in(recipe)
        eager = eager_steps(small, lambda tried: run(tried, recorded), lambda tried: run(tried, RecordedDraws(0)))
    except Exception as error:
        raise UnsupportedError(
            "--no-values: whether the optimizer's first step follows a rule of its own cannot be seen: on small "
            f"parameters it raised {type(error).__name__}: {error}",
            "leave --no-values out",
        ) from error
    generator = torch.Generator().manual_seed(0)
    return small, eager, [draw.values(generator) for draw in recorded.found]


def _places(recipe: Recipe, eager: EagerSteps) -> list[Place]:
    return [cell for cell in find_places(recipe, eager) if cell.kind is not StateForm.CONSTANT]


def _step(recipe: Recipe, draws: Sequence[torch.Tensor]) -> None:
    with ReplayedDraws(draws):
        for optimizer in recipe.optimizers:
            optimizer.step()


def _same(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    a, b, start = (tensor.detach().double() for tensor in (a, b, start))
    difference = float((a - b).norm())
    return not difference > _SHARE * float((a - start).norm()) + _ROUNDING * float(a.norm())
