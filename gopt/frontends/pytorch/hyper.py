"""Options of parameter groups as inputs of a step: the learning rate, and options of ``--hyper``."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gopt.errors import OptionError
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.options import ExportOptions
from gopt.frontends.pytorch.rates import (
    HORIZON,
    LR,
    OptionPlace,
    Rates,
    group_rates,
    moved_options,
    scheduled_options,
    share_of,
)
from gopt.text.sanitize import show
from gopt.text.suggestions import did_you_mean


@dataclass(frozen=True, slots=True)
class Setting:
    """An option of a group: ``factor`` times an input. ``index``: position in a tuple option; None for the whole
    option."""

    optimizer: int
    group: int
    option: str
    index: int | None
    input: str
    factor: float


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyper-parameter inputs with the values in the recipe, and the options set by them. ``rates``: input movable by a
    schedule, such as a learning rate -> option."""

    values: dict[str, torch.Tensor]
    settings: list[Setting]
    rates: dict[str, OptionPlace]

    def apply(self, group: dict[str, Any], optimizer: int, position: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """Set the options of a group to inputs; ``optimizer`` and ``position`` identify the group."""
        for setting in self.settings:
            if (setting.optimizer, setting.group) != (optimizer, position):
                continue
            value = _scaled(inputs[setting.input], setting.factor)
            if setting.index is None:
                group[setting.option] = value
            else:
                members = list(group[setting.option])
                members[setting.index] = value
                group[setting.option] = tuple(members)

    def base_rates(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The learning rate of each group of the only optimizer, before its schedule."""
        return [_scaled(inputs[setting.input], setting.factor) for setting in self.settings if setting.option == LR]


def _scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    return value if factor == 1 else value * factor


def hyper_inputs(
    recipe: Recipe, options: ExportOptions, scheduled: bool, carried: Container[tuple[int, int, str]] = ()
) -> Hyper:
    """``lr``, other options moved by the scheduler, and the options of ``--hyper`` as inputs.

    Groups of the same value share an input. Learning rates of groups are multiples of one ``lr``, the rate of the first
    group with a nonzero rate; if a schedule breaks this, there is ``lr.1`` too. Other different options have an input
    for each value: ``weight_decay``, ``weight_decay.1``. With ``scheduled`` the rates are those before the
    schedule. ``carried``: optimizer, group and option of states. Raises OptionError for an option no group has.
    """
    hyper = Hyper({}, [], {})
    groups = [
        (index, number, group)
        for index, optimizer in enumerate(recipe.optimizers)
        for number, group in enumerate(optimizer.param_groups)
    ]
    moved = moved_options(recipe)
    options_known = sorted({key for *_, group in groups for key, value in group.items() if _numbers(value)})
    for option in dict.fromkeys((*([LR] if LR in options_known else []), *options.hyper)):
        if option not in options_known:
            hint = did_you_mean(option, options_known) or f"they have {', '.join(options_known)}"
            raise OptionError(f"no parameter group has a number {show(option)} (--hyper)", hint)
        if option == LR:
            rates = group_rates(recipe, scheduled)
            _add_rates(hyper, {key: rate for key, rate in rates.items() if (*key, LR) not in carried})
        else:
            _add(hyper, option, [
                group for group in groups if option in group[2] and (*group[:2], option) not in carried
            ], moved)  # fmt: skip
    _add_moved(hyper, recipe, moved)
    return hyper


def _add_rates(hyper: Hyper, rates: Mapping[tuple[int, int], Rates]) -> None:
    bases: dict[str, Rates] = {}
    settings: dict[tuple[int, int], Setting] = {}
    for (index, number), group_rate in sorted(rates.items(), key=lambda pair: not any(pair[1].values)):
        shares = ((name, share_of(group_rate, base)) for name, base in bases.items())
        name, factor = next((share for share in shares if share[1] is not None), ("", None))
        if factor is None:
            name, factor = LR if not bases else f"{LR}.{len(bases)}", 1.0
            bases[name] = group_rate
            hyper.values[name] = torch.tensor(group_rate.values[0])
            hyper.rates[name] = index, number, LR, None
        settings[index, number] = Setting(index, number, LR, None, name, factor)
    hyper.settings.extend(settings[key] for key in rates)


def _add_moved(hyper: Hyper, recipe: Recipe, moved: Sequence[OptionPlace]) -> None:
    """Inputs for options the scheduler moves; options of equal values in each step share an input."""
    steps = scheduled_options(recipe, HORIZON, moved) if moved else []
    inputs: dict[tuple[str, tuple[float, ...]], str] = {}
    for index, group, option, member in moved:
        key = index, group, option, member
        name, series = option if member is None else f"{option}_{member}", tuple(step[key] for step in steps)
        if (name, series) not in inputs:
            count = sum(before == name for before, _ in inputs)
            numbered = inputs[name, series] = name if count == 0 else f"{name}.{count}"
            hyper.values[numbered], hyper.rates[numbered] = torch.tensor(series[0]), key
        hyper.settings.append(Setting(*key, inputs[name, series], 1.0))


def _add(hyper: Hyper, option: str, groups: list[Any], moved: Collection[OptionPlace]) -> None:
    """Inputs for an option, unless moved by the scheduler."""
    inputs: dict[tuple[int | None, float], str] = {}
    for index, at_group, group in groups:
        value = group[option]
        members = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for member, number in members:
            if (index, at_group, option, member) in moved:
                continue
            number = float(number)
            name = option if member is None else f"{option}_{member}"
            if (member, number) not in inputs:
                count = sum(key[0] == member for key in inputs)
                inputs[member, number] = name if count == 0 else f"{name}.{count}"
                hyper.values[inputs[member, number]] = torch.tensor(number)
            hyper.settings.append(Setting(index, at_group, option, member, inputs[member, number], 1.0))


def _numbers(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_numbers, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
