"""A scheduler's learning rates as a function of the number of steps: its closed form, written into the graph."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.eager_code import readable
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.options import Schedules
from gopt.frontends.pytorch.rates import moved_options

HORIZON = 300
"""Steps over which a closed form is compared with the scheduler itself."""


def closed_form(scheduler: Any, step: torch.Tensor, rates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The learning rates of all groups after ``step`` steps, from base rates; raises whatever the closed form
    raises."""
    tried = copy.copy(scheduler)
    tried.last_epoch, tried.base_lrs = step, list(rates)
    if type(tried) is torch.optim.lr_scheduler.MultiStepLR:
        rates_now = _milestones(tried)
    else:
        rates_now = tried._get_closed_form_lr() if hasattr(tried, "_get_closed_form_lr") else _lambdas(tried)
    return [torch.as_tensor(rate, dtype=torch.float32) for rate in rates_now]


def _milestones(scheduler: Any) -> Any:
    """MultiStepLR: gamma to the power of the number of milestones reached. MultiStepLR's closed form reads the step's
    value."""
    passed = sum((scheduler.last_epoch >= mark).float() * count for mark, count in scheduler.milestones.items())
    return [base * scheduler.gamma**passed for base in scheduler.base_lrs]


def _lambdas(scheduler: Any) -> Any:
    """LambdaLR: its learning rate is a closed form already."""
    if type(scheduler) is not torch.optim.lr_scheduler.LambdaLR:
        raise UnsupportedError(
            f"{type(scheduler).__name__} has no closed form", "take --scheduler input: the rate is fed"
        )
    return [base * rule(scheduler.last_epoch) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas)]


def in_graph(recipe: Recipe, wanted: Schedules) -> tuple[bool, str]:
    """Return whether the schedule is computed in the graph, and why not. Raises UnsupportedError where ``--scheduler
    graph`` cannot be met."""
    if recipe.scheduler is None:
        return False, ""
    if wanted is Schedules.INPUT:
        return False, ""
    moved = sorted({option for *_, option, _ in moved_options(recipe)})
    beside = f"it changes {' and '.join(map(repr, moved))} beside the rate" if moved else ""
    why = beside or _differs(recipe) or ("" if _is_traceable(recipe) else "it branches on the number of steps")
    if why and wanted is Schedules.GRAPH:
        raise UnsupportedError(
            f"the schedule of {type(recipe.scheduler).__name__} cannot be written into the graph: {why}",
            "take --scheduler input, and feed lr",
        )
    return not why, why


def _is_traceable(recipe: Recipe) -> bool:
    """Return whether the closed form reads no value of a tensor."""
    rates = [torch.tensor(float(rate)) for rate in recipe.scheduler.base_lrs]
    with readable():
        try:
            make_fx(lambda step, *rates: closed_form(recipe.scheduler, step, rates))(torch.tensor(0), *rates)
        except Exception:  # whatever user code raises where a number is a tensor
            return False
    return True


def _differs(recipe: Recipe) -> str:
    """Return why the closed form differs from the scheduler within HORIZON steps; '' if equal."""
    optimizers = recipe.optimizers
    if len(optimizers) > 1:
        return "there are several optimizers"
    if not hasattr(recipe.scheduler, "base_lrs"):
        return f"{type(recipe.scheduler).__name__} has no closed form"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer took a step
        tried = copy.deepcopy((optimizers[0], recipe.scheduler))[1]
        for step in range(tried.last_epoch, tried.last_epoch + HORIZON):
            expected = [group["lr"] for group in tried.optimizer.param_groups]
            try:
                with readable():
                    rates_now = closed_form(tried, torch.tensor(step), [torch.tensor(float(x)) for x in tried.base_lrs])
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            near = 1e-5 * max(abs(float(rate)) for rate in tried.base_lrs)  # it is computed in float32
            if not all(math.isclose(float(a), float(b), abs_tol=near) for a, b in zip(rates_now, expected)):
                return f"its closed form gives {[float(x) for x in rates_now]} behind step {step}, not {expected}"
            try:
                tried.step()
            except ValueError:  # a schedule of a fixed length has ended
                break
    return ""
