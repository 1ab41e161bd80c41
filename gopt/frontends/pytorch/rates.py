"""The learning rates of parameter groups over a schedule: which of them stay multiples of one another."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from gopt.frontends.pytorch.factory import Recipe

HORIZON = 3000
"""Steps of a schedule that are looked at."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a group. ``values``: in each step, of which the first is the current one; ``rule``: what computes
    them. Groups of different rules are not multiples of one another, whatever they are in the steps that were looked
    at."""

    values: tuple[float, ...]
    rule: Hashable = None


def group_rates(recipe: Recipe, scheduled: bool) -> dict[tuple[int, int], Rates]:
    """Optimizer and group -> its rates. ``scheduled``: those before the schedule, which the graph computes."""
    groups = {
        (index, place): group
        for index, optimizer in enumerate(recipe.optimizers)
        for place, group in enumerate(optimizer.param_groups)
        if "lr" in group
    }
    if scheduled:
        return {key: Rates((float(recipe.scheduler.base_lrs[key[1]]),)) for key in groups}
    if recipe.scheduler is None:
        return {key: Rates((float(group["lr"]),)) for key, group in groups.items()}
    steps = scheduled_rates(recipe, HORIZON)
    return {
        key: Rates(tuple(step[key] for step in steps), _rule(recipe.scheduler, recipe.optimizers[key[0]], key[1]))
        for key in groups
    }


def share_of(rates: Rates, base: Rates) -> float | None:
    """The number that ``rates`` is times ``base`` in each step; None where there is none."""
    if not any(rates.values):
        return 0.0
    if rates.rule != base.rule:
        return None
    share = next(a / b for a, b in zip(rates.values, base.values) if b) if any(base.values) else 1.0
    near = 1e-6 * max(map(abs, rates.values))
    fits = all(math.isclose(a, share * b, rel_tol=1e-6, abs_tol=near) for a, b in zip(rates.values, base.values))
    return share if fits else None


def scheduled_rates(recipe: Recipe, steps: int) -> list[dict[tuple[int, int], float]]:
    """The rates of all optimizers and groups in each step from the current one; fewer where the schedule ends."""
    optimizers, scheduler = copy.deepcopy((recipe.optimizers, recipe.scheduler))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer took a step
        for _ in range(steps):
            found.append(
                {
                    (index, place): float(group["lr"])
                    for index, optimizer in enumerate(optimizers)
                    for place, group in enumerate(optimizer.param_groups)
                    if "lr" in group
                }
            )
            try:
                scheduler.step()
            except ValueError:  # a schedule of a fixed length has ended
                break
    return found


def _rule(scheduler: Any, optimizer: Any, place: int) -> Hashable:
    """The rule of a group's rate: the optimizer's schedule, and the functions of the group."""
    if getattr(scheduler, "optimizer", None) is not optimizer:
        return "none"
    inner = getattr(scheduler, "_schedulers", ())
    functions = getattr(scheduler, "lr_lambdas", None)
    own = () if functions is None else (id(functions[place]),)
    return (*own, *(_rule(each, optimizer, place) for each in inner))
