"""The names that PyTorch has for the states and constants of a step, and the options of its optimizers."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from gopt.documents.torch_record import TorchGroup, TorchOptimizer, TorchParameter, TorchRecord, TorchScheduler
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.optimizer_runs import started
from gopt.frontends.pytorch.options import DYNAMIC, ExportOptions
from gopt.frontends.pytorch.rate_formulas import fitted
from gopt.frontends.pytorch.rates import LR, OptionPlace, moved_options, scheduled_options
from gopt.frontends.pytorch.states import Place, StateForm

SCALE, TRACKER = "loss_scale", "loss_scale.growth_tracker"
_STEPS = 3
"""Steps before and behind which a scheduler is compared with one that was loaded."""


def torch_record(
    recipe: Recipe, options: ExportOptions, places: Sequence[Place], apart: Collection[int]
) -> TorchRecord:
    """The record of a recipe. ``apart``: optimizers whose first step differs from the others."""
    names = {id(each.read()): each.name for each in places if each.kind is not StateForm.OPTIMIZER}
    module, lost = _state_dict(recipe.module, names)
    loss = _state_dict(recipe.loss, names)[0] if isinstance(recipe.loss, torch.nn.Module) else {}
    trained = [each.name for each in places if each.kind is StateForm.PARAMETER]
    moved = moved_options(recipe)
    rates = [] if recipe.scheduler is None else scheduled_options(recipe, options.schedule_steps, moved)
    return TorchRecord(
        module=module,
        loss=loss or None,
        averages={name: f"ema.{name}" for name in trained} if options.ema is not None else None,
        optimizers=tuple(
            _optimizer(index, each, places, names, rates, started(index) if index in apart else "")
            for index, each in enumerate(recipe.optimizers)
        ),
        scheduler=_scheduler(recipe),
        scaler={"scale": SCALE, "_growth_tracker": TRACKER} if options.loss_scale == DYNAMIC else None,
        lost=tuple(lost),
    )


def _state_dict(module: torch.nn.Module, names: Mapping[int, str]) -> tuple[dict[str, str], list[str]]:
    """Name in the state dict -> value of the step, and the names whose values are no tensors of the module."""
    found = {key: names.get(id(value)) for key, value in module.state_dict(keep_vars=True).items()}
    known = {key: name for key, name in found.items() if name is not None}
    return known, [key for key in found if key not in known]


def _optimizer(
    index: int, optimizer: torch.optim.Optimizer, places: Sequence[Place], names: Mapping[int, str],
    rates: Sequence[Mapping[OptionPlace, float]], first: str,
) -> TorchOptimizer:  # fmt: skip
    slots: dict[str | int | None, dict[str, Place]] = {}
    for each in places:
        if each.kind is StateForm.OPTIMIZER and each.owner == index and each.slot is not None:
            slots.setdefault(each.slot[0], {})[each.slot[1]] = each
    groups = []
    for place, group in enumerate(optimizer.param_groups):
        counters = {key: each.name for key, each in slots.get(place, {}).items()}
        options = {key: plain(value) for key, value in group.items() if key != "params" and key not in counters}
        options_now = [option for option in (rates[0] if rates else ()) if option[:2] == (index, place)]
        fits = {option: fitted([step[option] for step in rates]) for option in options_now}
        moved = {
            option if member is None else f"{option}_{member}": fit
            for (*_, option, member), fit in fits.items() if option != LR
        }  # fmt: skip
        parameters = tuple(_parameter(optimizer, each, names.get(id(each), ""), slots) for each in group["params"])
        known = {key: value for key, value in options.items() if value is not LOST}
        groups.append(
            TorchGroup(
                parameters=parameters,
                options=known,
                counters=counters or None,
                rate=fits.get((index, place, LR, None)),
                moved=moved or None,
            )
        )
    return TorchOptimizer(name=type(optimizer).__name__, groups=tuple(groups), started=first)


def _parameter(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, slots: Mapping[Any, Mapping[str, Place]]
) -> TorchParameter:
    held = slots.get(name, {})
    others = {
        key: found
        for key, value in optimizer.state.get(parameter, {}).items()
        if key not in held and (found := plain(value)) is not LOST
    }
    return TorchParameter(
        name=name, states={key: each.name for key, each in held.items()},
        numbers=tuple(key for key, each in held.items() if each.number), others=others or None,
    )  # fmt: skip


LOST: Any = object()
"""Stands for a value that JSON cannot hold."""


def plain(value: Any) -> Any:
    """An option as JSON has it: a tuple as ``{"tuple": [...]}``, a tensor of one element as a number; or LOST."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else LOST
    if isinstance(value, list | tuple):
        inner = [plain(each) for each in value]
        whole = inner if isinstance(value, list) else {"tuple": inner}
        return LOST if any(each is LOST for each in inner) else whole
    return LOST


def _scheduler(recipe: Recipe) -> TorchScheduler | None:
    """The record of the scheduler, where a fresh one that gets its count of steps goes on as it would."""
    if recipe.scheduler is None or not isinstance(getattr(recipe.scheduler, "last_epoch", None), int):
        return None
    name, first = type(recipe.scheduler).__name__, recipe.scheduler.last_epoch
    functions = getattr(recipe.scheduler, "lr_lambdas", None)
    others = None if functions is None else {"lr_lambdas": [None] * len(functions)}
    found = TorchScheduler(name=name, first=first, others=others)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer took a step
        optimizers, gone = copy.deepcopy((recipe.optimizers, recipe.scheduler))
        others_of, loaded = copy.deepcopy((recipe.optimizers, recipe.scheduler))
        try:
            for _ in range(_STEPS):
                gone.step()
            rates = [group["lr"] for each in optimizers for group in each.param_groups]
            for group, rate in zip((group for each in others_of for group in each.param_groups), rates):
                group["lr"] = rate
            loaded.load_state_dict(scheduler_state(found, _STEPS, rates))
            for _ in range(_STEPS):
                gone.step()
                loaded.step()
        except Exception:  # whatever a scheduler of the user raises
            return None
    ends = [[group["lr"] for each in one for group in each.param_groups] for one in (optimizers, others_of)]
    return found if all(map(math.isclose, *ends)) else None


def scheduler_state(record: TorchScheduler, steps: int, rates: Sequence[float]) -> dict[str, Any]:
    """The state of a scheduler behind ``steps`` steps, as its ``load_state_dict`` takes it."""
    count = record.first + steps
    return {"last_epoch": count, "_step_count": count + 1, "_last_lr": list(rates), **(record.others or {})}
