"""The names PyTorch has for the states and constants of a step, and the options of the optimizers."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from gopt.documents.torch_record import TorchGroup, TorchOptimizer, TorchParameter, TorchRecord, TorchScheduler
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.optimizer_runs import started
from gopt.frontends.pytorch.options import DYNAMIC, ExportOptions
from gopt.frontends.pytorch.python_values import UNOWNED, Home
from gopt.frontends.pytorch.rate_formulas import fitted
from gopt.frontends.pytorch.rates import LR, OptionPlace, moved_options, scheduled_options
from gopt.frontends.pytorch.states import Place, StateForm
from gopt.frontends.pytorch.value_trees import Keys

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
    slots: dict[Home, dict[Keys, Place]] = {}
    for cell in cells:
        if cell.kind is StateForm.OPTIMIZER and cell.owner == index:
            for home, keys in cell.slots:
                slots.setdefault(home, {})[keys] = cell
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        states = _trees(slots.get(number, {}))
        counters = {key: tree["number"] for key, tree in states.items() if isinstance(tree, dict) and "number" in tree}
        options = {key: plain(value) for key, value in group.items() if key != "params" and key not in states}
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
                states={key: tree for key, tree in states.items() if key not in counters} or None,
                rate=fits.get((index, number, LR, None)),
                moved=moved or None,
            )
        )
    unowned = _trees(slots.get(UNOWNED, {})) or None
    return TorchOptimizer(name=type(optimizer).__name__, groups=tuple(groups), started=flag, unowned=unowned)


def _parameter(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str, slots: Mapping[Home, Mapping[Keys, Place]]
) -> TorchParameter:
    slot = {str(keys[0]): cell for keys, cell in slots.get(name, {}).items() if len(keys) == 1}
    nested = _trees({keys: cell for keys, cell in slots.get(name, {}).items() if len(keys) > 1})
    plain_others = nested | {
        key: plain_value
        for key, value in optimizer.state.get(parameter, {}).items()
        if key not in slot and key not in nested and (plain_value := plain(value)) is not LOST
    }
    return TorchParameter(
        name=name, states={key: cell.name for key, cell in slot.items()},
        numbers=tuple(key for key, cell in slot.items() if cell.number), others=plain_others or None,
    )  # fmt: skip


LOST: Any = object()
"""Stands for a value that JSON cannot hold."""


def _trees(cells: Mapping[Keys, Place]) -> dict[str, Any]:
    """By outermost key, the plain form of a value, with the names of states; values without a form in JSON are left
    out."""
    trees = {}
    for keys, cell in cells.items():
        tree = plain(cell.container if len(keys) > 1 else cell.value, cells, keys[:1])
        if tree is not LOST:
            trees[str(keys[0])] = tree
    return trees


def plain(value: Any, states: Mapping[Keys, Place] | None = None, keys: Keys = ()) -> Any:
    """An option as JSON has it: a tuple as ``{"tuple": [...]}``, a tensor of a single element as a number; or LOST.

    ``states``: places by their keys; ``keys``: of the value. A state is ``{"state": name}``, or ``{"number": name}``; a
    dict is ``{"dict": [[key, value], ...]}``."""
    if states is not None and keys in states:
        return {"number" if states[keys].number else "state": states[keys].name}
    if states is not None and type(value) in (dict, OrderedDict):
        pairs = [[plain(key), plain(inner, states, (*keys, key))] for key, inner in value.items()]
        return LOST if any(part is LOST for pair in pairs for part in pair) else {"dict": pairs}
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else LOST
    if isinstance(value, list | tuple):
        inner = [plain(part, states, (*keys, position)) for position, part in enumerate(value)]
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
