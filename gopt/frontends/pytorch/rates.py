"""The options of parameter groups over a schedule: rates, partly multiples of one another, and other options moved by a
scheduler, such as a momentum."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.value_trees import is_number, leaves

HORIZON = 3000
"""Steps of a schedule that are looked at."""
LR = "lr"
OptionPlace = tuple[int, int, str, int | None]
"""An option of a group: optimizer, group, option and position in a tuple, None for the whole option."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a group. ``values``: in each step, the current first; ``rule``: the source of the rates. Groups of
    different rules are not multiples of one another, whatever the steps show."""

    values: tuple[float, ...]
    rule: Hashable = None


def group_rates(recipe: Recipe, scheduled: bool) -> dict[tuple[int, int], Rates]:
    """Optimizer and group -> rates. ``scheduled``: rates before the schedule, which is in the graph."""
    groups = {
        (index, number): group
        for index, optimizer in enumerate(recipe.optimizers)
        for number, group in enumerate(optimizer.param_groups)
        if "lr" in group
    }
    if scheduled:
        return {key: Rates((float(recipe.scheduler.base_lrs[key[1]]),)) for key in groups}
    if recipe.scheduler is None:
        return {key: Rates((float(group["lr"]),)) for key, group in groups.items()}
    steps = scheduled_options(recipe, HORIZON)
    return {
        key: Rates(
            tuple(step[*key, LR, None] for step in steps), _rule(recipe.scheduler, recipe.optimizers[key[0]], key[1])
        )
        for key in groups
    }


def share_of(rates: Rates, base: Rates) -> float | None:
    """The factor from ``base`` to ``rates`` in each step; None without a common factor."""
    if not any(rates.values):
        return 0.0
    if rates.rule != base.rule:
        return None
    share = next(a / b for a, b in zip(rates.values, base.values) if b) if any(base.values) else 1.0
    near = 1e-6 * max(map(abs, rates.values))
    fits = all(math.isclose(a, share * b, rel_tol=1e-6, abs_tol=near) for a, b in zip(rates.values, base.values))
    return share if fits else None


def moved_options(recipe: Recipe) -> list[OptionPlace]:
    """The options changed by the scheduler in the first step, without the rate."""
    if recipe.scheduler is None:
        return []
    before, *after = scheduled_options(recipe, 2, None)
    return [
        option for option, value in before.items() if option[2] != LR and any(one[option] != value for one in after)
    ]


def scheduled_options(
    recipe: Recipe, steps: int, beside: Collection[OptionPlace] | None = ()
) -> list[dict[OptionPlace, float]]:
    """The rates of all optimizers and groups in each step from now, and the options ``beside``, None for all; fewer
    steps if the schedule ends."""
    # Tensors are shared, not copied: a scheduler moves the options of groups alone.
    tensors = [x for optimizer in recipe.optimizers for group in optimizer.param_groups for x in group["params"]]
    tensors += [x for one in recipe.optimizers for state in one.state.values() for _, x in leaves(state)]
    shared = {id(x): x for x in tensors if isinstance(x, torch.Tensor)}
    optimizers, scheduler = copy.deepcopy((recipe.optimizers, recipe.scheduler), shared)
    series: list[dict[OptionPlace, float]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer took a step
        for _ in range(steps):
            series.append(
                {
                    option: value
                    for index, optimizer in enumerate(optimizers)
                    for number, group in enumerate(optimizer.param_groups)
                    for option, value in _numbers(index, number, group)
                    if option[2] == LR or beside is None or option in beside
                }
            )
            try:
                scheduler.step()
            except ValueError:  # a schedule of a fixed length has ended
                break
    return series


def _numbers(index: int, number: int, group: Mapping[str, Any]) -> Iterator[tuple[OptionPlace, float]]:
    for option, value in group.items():
        for member, entry in enumerate(value) if isinstance(value, tuple) else [(None, value)]:
            if option == LR or is_number(entry) or (isinstance(entry, torch.Tensor) and entry.numel() == 1):
                yield (index, number, option, member), float(entry)


def _rule(scheduler: Any, optimizer: Any, number: int) -> Hashable:
    """The rule of a group's rate: the optimizer's schedule, and the functions of the group."""
    if getattr(scheduler, "optimizer", None) is not optimizer:
        return "none"
    inner = getattr(scheduler, "_schedulers", ())
    functions = getattr(scheduler, "lr_lambdas", None)
    functions_here = () if functions is None else (id(functions[number]),)
    return (*functions_here, *(_rule(scheduler_inside, optimizer, number) for scheduler_inside in inner))
