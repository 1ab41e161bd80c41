"""Tensors and numbers that an optimizer carries from step to step outside of the states of parameters: in options of
groups, in attributes, and in ``optimizer.state`` under keys that are no parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gopt.frontends.pytorch.python_values import UNOWNED, Home, Path, equal, own_attributes, path_of
from gopt.frontends.pytorch.value_trees import Keys, find, is_number, leaves

Spot = tuple[Home, Keys]


@dataclass(frozen=True, slots=True)
class CarriedValue:
    """``start``: before the first step; ``spots``: where the value stands, several for a tensor; ``number``: whether
    steps may store a number of Python."""

    start: Any
    spots: tuple[Spot, ...]
    number: bool


@dataclass(frozen=True, slots=True)
class HeldValues:
    """Copies of what an optimizer holds; ``initial``: before changes in place by the last step; ``ids``: of tensors."""

    values: dict[Spot, Any]
    initial: dict[Spot, Any]
    ids: dict[Spot, int]


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def home_table(optimizer: torch.optim.Optimizer, home: Home) -> dict[Any, Any]:
    """The dict of a home other than a parameter's state."""
    if home is None:
        return vars(optimizer)
    return optimizer.state if home == UNOWNED else optimizer.param_groups[int(home)]


def held_values(
    optimizer: torch.optim.Optimizer, names: Container[int], initially: Callable[[Any], Any] = copied
) -> HeldValues:
    """The present values. ``names``: ids of parameters; ``initially``: a value before changes in place by a step."""
    of_states = {id(leaf) for state in parameter_states(optimizer).values() for _, leaf in leaves(state)}
    spots = [
        (spot, value) for spot, value in spots_of(optimizer)
        if not isinstance(value, torch.Tensor) or (id(value) not in names and id(value) not in of_states)
    ]  # fmt: skip
    return HeldValues(
        {spot: copied(value) for spot, value in spots}, {spot: initially(value) for spot, value in spots},
        {spot: id(value) for spot, value in spots if isinstance(value, torch.Tensor)},
    )  # fmt: skip


def parameter_states(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """``optimizer.state`` without keys that are no tensors."""
    return {key: state for key, state in optimizer.state.items() if isinstance(key, torch.Tensor)}


def spots_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Spot, Any]]:
    """Yield values outside of the states of parameters."""
    homes: list[tuple[Home, dict[Any, Any]]] = [
        (number, {key: value for key, value in group.items() if key != "params"})
        for number, group in enumerate(optimizer.param_groups)
    ]
    homes += [(None, own_attributes(optimizer))]
    homes += [(UNOWNED, {key: state for key, state in optimizer.state.items() if isinstance(key, str)})]
    for home, table in homes:
        for keys, value in leaves(table):
            yield (home, keys), value


def carried_values(
    start: HeldValues, after_one: HeldValues, after_two: HeldValues, moved: Callable[[Path], bool]
) -> list[CarriedValue]:
    """The values that two steps change or make; ``moved``: whether a scheduler changes the value of a path."""
    carried: dict[Any, CarriedValue] = {}
    for spot, value in after_one.values.items():
        before, after = start.values.get(spot), after_two.values.get(spot)
        if after is None or moved(path_of(*spot)):
            continue
        if before is not None and _equal_values(value, after) and _equal_values(before, value):
            continue
        initial = before if before is not None else after_one.initial[spot]
        if before is None and is_number(value) and is_number(after):
            initial = 2 * value - after  # counted up before it is stored
        number = any(map(is_number, (before, value, after)))
        sizes = {part.shape for part in (value, after) if isinstance(part, torch.Tensor)}
        if len(sizes) > 1:
            continue
        if number and all(size.numel() == 1 for size in sizes):
            initial = 0.0 if isinstance(initial, FakeTensor) else float(initial)
        elif number:
            whole = value if isinstance(value, torch.Tensor) else after
            initial, number = torch.full_like(whole, float(initial)) if is_number(initial) else initial, False
        elif initial.shape != value.shape:
            initial = torch.zeros_like(value)
        key = (after_one.ids[spot], after_two.ids[spot]) if spot in after_one.ids and spot in after_two.ids else spot
        earlier = carried[key].spots if key in carried else ()
        carried[key] = CarriedValue(initial, (*earlier, spot), number)
    return list(carried.values())


def _equal_values(old: Any, new: Any) -> bool:
    return not isinstance(old, FakeTensor) and not isinstance(new, FakeTensor) and equal(old, new)


def late_spots(before: Mapping[Spot, Any], optimizer: torch.optim.Optimizer, slots: Container[Spot]) -> list[Spot]:
    """Spots outside of ``slots`` where a traced step stored another tensor of the graph than ``before``: the second
    eager step did not change their values."""
    return [
        spot for spot, value in spots_of(optimizer)
        if isinstance(value, FunctionalTensor) and spot not in slots and value is not before.get(spot)
        and value.shape == getattr(before.get(spot), "shape", value.shape if value.numel() == 1 else None)
    ]  # fmt: skip


def late_value(spot: Spot, optimizer: torch.optim.Optimizer) -> CarriedValue:
    """The value of a late spot, in an optimizer before its first step; a missing number is zero."""
    value = find(home_table(optimizer, spot[0]), spot[1])
    if isinstance(value, torch.Tensor):
        return CarriedValue(copied(value), (spot,), number=False)
    return CarriedValue(float(value or 0.0), (spot,), number=True)


def paths_of(values: Collection[CarriedValue]) -> set[Path]:
    return {path_of(*spot) for value in values for spot in value.spots}
