"""The names PyTorch has for the states and constants of a step, and the options of the optimizers."""

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


def torch_record(recipe: Recipe, options: ExportOptions, cells: Sequence[Place], apart: Collection[int]) -> TorchRecord:
    """The record of a recipe. ``apart``: optimizers with a different first step."""
    names = {id(cell.read()): cell.name for cell in cells if cell.kind is not StateForm.OPTIMIZER}
    module, lost = _state_dict(recipe.module, names)
    loss = _state_dict(recipe.loss, names)[0] if isinstance(recipe.loss, torch.nn.Module) else {}
    trained = [cell.name for cell in cells if cell.kind is StateForm.PARAMETER]
    moved = moved_options(recipe)
    rates = [] if recipe.scheduler is None else scheduled_options(recipe, options.schedule_steps, moved)
    return TorchRecord(
        module=module,
        loss=loss or None,
        averages={name: f"ema.{name}" for name in trained} if options.ema is not None else None,
        optimizers=tuple(
            _optimizer(index, optimizer, cells, names, rates, started(index) if index in apart else "")
            for index, optimizer in enumerate(recipe.optimizers)
        ),
        scheduler=_scheduler(recipe),
        scaler={"scale": SCALE, "_growth_tracker": TRACKER} if options.loss_scale == DYNAMIC else None,
        lost=tuple(lost),
    )


def _state_dict(module: torch.nn.Module, names: Mapping[int, str]) -> tuple[dict[str, str], list[str]]:
    """Name in the state dict -> value of the step, and names with values other than tensors of the module."""
    entries = {key: names.get(id(value)) for key, value in module.state_dict(keep_vars=True).items()}
    named = {key: name for key, name in entries.items() if name is not None}
    return named, [key for key in entries if key not in named]


def _optimizer(
    index: int, optimizer: torch.optim.Optimizer, cells: Sequence[Place], names: Mapping[int, str],
    rates: Sequence[Mapping[OptionPlace, float]], flag: str,
) -> TorchOptimizer:  # fmt: skip
    slots: dict[str | int | None, dict[str, Place]] = {}
    for cell in cells:
        if cell.kind is StateForm.OPTIMIZER and cell.owner == index and cell.slot is not None:
            slots.setdefault(cell.slot[0], {})[cell.slot[1]] = cell
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        counters = {key: state.name for key, state in slots.get(number, {}).items()}
        options = {key: plain(value) for key, value in group.items() if key != "params" and key not in counters}
        options_now = [option for option in (rates[0] if rates else ()) if option[:2] == (index, number)]
        fits = {option: fitted([step[option] for step in rates]) for option in options_now}
        moved = {
            option if member is None else f"{option}_{member}": fit
            for (*_, option, member), fit in fits.items() if option != LR
        }  # fmt: skip
        parameters = tuple(_parameter(optimizer, param, names.get(id(param), ""), slots) for param in group["params"])
        plain_options = {key: value for key, value in options.items() if value is not LOST}
        groups.append(
            TorchGroup(
                parameters=parameters,
                options=plain_options,
                counters=counters or None,
                rate=fits.get((index, number, LR, None)),
                moved=moved or None,
            )
        )
    return TorchOptimizer(name=type(optimizer).__name__, groups=tuple(groups), started=flag)


def _parameter(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, slots: Mapping[Any, Mapping[str, Place]]
) -> TorchParameter:
    slot = slots.get(name, {})
    plain_others = {
        key: plain_value
        for key, value in optimizer.state.get(parameter, {}).items()
        if key not in slot and (plain_value := plain(value)) is not LOST
    }
    return TorchParameter(
        name=name, states={key: cell.name for key, cell in slot.items()},
        numbers=tuple(key for key, cell in slot.items() if cell.number), others=plain_others or None,
    )  # fmt: skip


LOST: Any = object()
"""Stands for a value that JSON cannot hold."""


def plain(value: Any) -> Any:
    """An option as JSON has it: a tuple as ``{"tuple": [...]}``, a tensor of a single element as a number; or LOST."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else LOST
    if isinstance(value, list | tuple):
        inner = [plain(part) for part in value]
        whole = inner if isinstance(value, list) else {"tuple": inner}
        return LOST if any(part is LOST for part in inner) else whole
    return LOST


def _scheduler(recipe: Recipe) -> TorchScheduler | None:
    """The record of the scheduler, if a fresh scheduler with its count of steps continues alike."""
    if recipe.scheduler is None or not isinstance(getattr(recipe.scheduler, "last_epoch", None), int):
        return None
    name, epoch = type(recipe.scheduler).__name__, recipe.scheduler.last_epoch
    functions = getattr(recipe.scheduler, "lr_lambdas", None)
    lambdas = None if functions is None else {"lr_lambdas": [None] * len(functions)}
    record = TorchScheduler(name=name, first=epoch, others=lambdas)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer took a step
        optimizers, gone = copy.deepcopy((recipe.optimizers, recipe.scheduler))
        others_of, loaded = copy.deepcopy((recipe.optimizers, recipe.scheduler))
        try:
            for _ in range(_STEPS):
                gone.step()
            rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
            for group, rate in zip((group for optimizer in others_of for group in optimizer.param_groups), rates):
                group["lr"] = rate
            loaded.load_state_dict(scheduler_state(record, _STEPS, rates))
            for _ in range(_STEPS):
                gone.step()
                loaded.step()
        except Exception:  # whatever a scheduler of the user raises
            return None
    ends = [[group["lr"] for optimizer in one for group in optimizer.param_groups] for one in (optimizers, others_of)]
    return record if all(map(math.isclose, *ends)) else None


def scheduler_state(record: TorchScheduler, steps: int, rates: Sequence[float]) -> dict[str, Any]:
    """The state of a scheduler behind ``steps`` steps, for ``load_state_dict``."""
    count = record.first + steps
    return {"last_epoch": count, "_step_count": count + 1, "_last_lr": list(rates), **(record.others or {})}
