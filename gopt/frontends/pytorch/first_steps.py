"""Optimizers whose first step differs: it stores gradients, or it is computed by another rule.

The values that the first eager step stores are those of a state before it. That is wrong where they depend on the
gradients, and where the optimizer looks for a state to know its first step.
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


def first_steps_apart(recipe: Recipe, seen: EagerSteps, draws: Sequence[torch.Tensor]) -> frozenset[int]:
    """The indices of optimizers whose first step differs from a step from the first values of their states.

    ``draws``: the random numbers of the step that ``seen`` comes from. Both steps get the same gradients, which are not
    those of that step. Without values, small parameters stand for those of the recipe.
    """
    if any(isinstance(each, FakeTensor) for each in recipe.whole.parameters()):
        recipe, seen, draws = _with_values(recipe)
    plain, given = copy.deepcopy(recipe), copy.deepcopy(recipe)
    places, others = _places(plain, seen), _places(given, seen)
    first = {each.name: each.value.detach().clone() for each in places}
    for place in others:
        if place.kind is StateForm.OPTIMIZER and place.read() is None:
            place.store()
    store_others(given, seen)
    numbers = ReplayedDraws(draws)
    with on_attention_math(), numbers:
        plain.loss_of(plain.batch).backward()
    generator = torch.Generator().manual_seed(3)
    for place, other in zip(places, others):
        value, twin = place.read(), other.read()
        if place.kind is StateForm.PARAMETER and value is not None and value.grad is not None and twin is not None:
            value.grad *= 1 + torch.randn(value.shape, generator=generator).to(value.dtype) / 2
            twin.grad = value.grad.clone()
    taken = numbers.taken
    _step(plain, draws[taken:])
    try:
        _step(given, draws[taken:])
    except Exception:  # the trace meets the same error, and reports it
        return frozenset()
    changed = next((each for each in places if each.current.shape != first[each.name].shape), None)
    if changed is not None:
        old, new = list(first[changed.name].shape), list(changed.current.shape)
        raise UnsupportedError(
            f"the optimizer changes the shape of its state {show(changed.name)}: {old} becomes {new}",
            "a state of a graph has one shape in all steps",
        )
    return frozenset(
        place.owner
        for place, other in zip(places, others)
        if place.owner is not None and not _same(place.current, other.current, first[place.name])
    )


def _with_values(recipe: Recipe) -> tuple[Recipe, EagerSteps, list[torch.Tensor]]:
    """A small recipe with the same optimizers, what its first step stores, and that step's random numbers."""
    recorded = RecordedDraws(0)

    def run(tried: Recipe, numbers: RecordedDraws) -> None:
        with numbers:
            EagerTraining(tried, ExportOptions()).step(tried.batch)

    try:
        small = stand_in(recipe)
        seen = eager_steps(small, lambda tried: run(tried, recorded), lambda tried: run(tried, RecordedDraws(0)))
    except Exception as error:
        raise UnsupportedError(
            "--no-values: whether the optimizer's first step follows a rule of its own cannot be seen: on small "
            f"parameters it raised {type(error).__name__}: {error}",
            "leave --no-values out",
        ) from error
    generator = torch.Generator().manual_seed(0)
    return small, seen, [each.values(generator) for each in recorded.found]


def _places(recipe: Recipe, seen: EagerSteps) -> list[Place]:
    return [each for each in find_places(recipe, seen) if each.kind is not StateForm.CONSTANT]


def _step(recipe: Recipe, draws: Sequence[torch.Tensor]) -> None:
    with ReplayedDraws(draws):
        for optimizer in recipe.optimizers:
            optimizer.step()


def _same(a: torch.Tensor, b: torch.Tensor, first: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    a, b, first = (each.detach().double() for each in (a, b, first))
    difference = float((a - b).norm())
    return not difference > _SHARE * float((a - first).norm()) + _ROUNDING * float(a.norm())
