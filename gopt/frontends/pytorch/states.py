"""The values that a training step carries from step to step, and their values before the first one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.eager_steps import EagerSteps, parameter_names, tensors_of
from gopt.frontends.pytorch.factory import Recipe


class StateForm(Enum):
    """The role of the tensor at a place."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer state"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A frozen parameter, or a buffer that no step changes."""


@dataclass(slots=True)
class Place:
    """A tensor of training code that can be replaced by another.

    ``value``: its value before the first step. ``read`` gives None where the optimizer has not stored it yet, and to
    ``write`` None removes it. ``owner``: index of the optimizer that updates it, None for buffers and constants.
    ``number``: whether it is a number of Python. ``is_scalar``: whether eager code takes ``item()`` of it, such as of a
    count, and computes in float64, where ``1 - 0.999 ** count`` keeps its digits. ``slot``: of a state or counter of an
    optimizer, its parameter's name or its group, and its key.
    """

    name: str
    kind: StateForm
    value: torch.Tensor
    write: Callable[[Any], None]
    read: Callable[[], torch.Tensor | None]
    owner: int | None = None
    number: bool = False
    is_scalar: bool = False
    slot: tuple[str | int | None, str] | None = None

    def store(self) -> None:
        """Write its value before the first step, as a number where it is one."""
        if not self.number:
            self.write(self.value.clone())
            return
        number = float(self.value)
        self.write(int(number) if number.is_integer() else number)

    @property
    def current(self) -> torch.Tensor:
        """The current tensor, or its value before the first step."""
        found = self.read()
        return self.value if found is None else found


def find_places(recipe: Recipe, seen: EagerSteps) -> list[Place]:
    """Every place of a recipe: parameters, optimizer states, buffers, constants. Raises UnsupportedError where
    nothing is trained."""
    parameters, constants = _parameters(recipe, seen)
    if not parameters:
        raise UnsupportedError(
            "the optimizer has no parameter that needs a gradient", "give it module.parameters(), with requires_grad"
        )
    owners = {id(place.read()): place for place in parameters}
    places = [*parameters]
    for index, optimizer in enumerate(recipe.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = owners.get(id(parameter))
                if owner is not None:
                    places += _states_of(optimizer, index, parameter, owner, seen)
        for place, group in enumerate(optimizer.param_groups):
            counters = seen.counters.get((index, place), {})
            prefix = f"optimizer{index}.group{place}"
            places += [_counter(f"{prefix}.{key}", index, group, (place, key), each) for key, each in counters.items()]
        for key, value in seen.counters.get((index, None), {}).items():
            places.append(_counter(f"optimizer{index}.{key}", index, vars(optimizer), (None, key), value))
    for spots in tensors_of(recipe.whole, "_buffers").values():
        held, key, name = spots[0]
        places.append(_module_place(name, _kind(spots, seen), held[key], spots))
    return [*_unique(places), *constants]


def _parameters(recipe: Recipe, seen: EagerSteps) -> tuple[list[Place], list[Place]]:
    """Parameters that an optimizer updates, and all others: constants, or buffers where the module changes them."""
    owners = {
        id(parameter): index
        for index, optimizer in enumerate(recipe.optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trained, constant = [], []
    for key, spots in tensors_of(recipe.whole, "_parameters").items():
        held, own, name = spots[0]
        value = held[own]
        if value.requires_grad and key in owners:
            trained.append(_module_place(name, StateForm.PARAMETER, value, spots, owners[key]))
        else:
            constant.append(_module_place(name, _kind(spots, seen), value, spots))
    known = {id(place.read()) for place in trained}
    lost = next((key for key in owners if key not in known and key not in map(_id_of, constant)), None)
    if lost is not None:
        raise UnsupportedError(
            "the optimizer has a parameter that is not in the module", "register it in the module that is returned"
        )
    return trained, constant


def _kind(spots: Any, seen: EagerSteps) -> StateForm:
    return StateForm.BUFFER if any(spot[2] in seen.buffers for spot in spots) else StateForm.CONSTANT


def _id_of(place: Place) -> int:
    return id(place.read())


def _module_place(name: str, kind: StateForm, value: torch.Tensor, spots: Any, owner: int | None = None) -> Place:
    def write(new: torch.Tensor | None) -> None:
        for held, key, _ in spots:
            held[key] = new

    return Place(name, kind, value.detach(), write, lambda: spots[0][0][spots[0][1]], owner)


def _states_of(
    optimizer: torch.optim.Optimizer, index: int, parameter: torch.Tensor, owner: Place, seen: EagerSteps
) -> Iterator[Place]:
    """Places in the state of one parameter, whose dict stays the same object when its parameter is swapped."""
    held = optimizer.state[parameter]
    for key, first in seen.states.get((index, owner.name), {}).items():
        value = _tensor(first).clone()

        def write(new: torch.Tensor | None, key: str = key) -> None:
            if new is None:
                held.pop(key, None)
            else:
                held[key] = new

        def read(key: str = key) -> torch.Tensor | None:
            return _tensor(held[key]) if key in held else None

        number = not isinstance(first, torch.Tensor)
        scalar = not value.dim() and value.dtype is torch.float32
        if not isinstance(first, FakeTensor):  # of those it is not known what code reads
            scalar = scalar and (index, owner.name, key) in seen.read
        name, slot = f"{owner.name}.{key}", (owner.name, key)
        yield Place(name, StateForm.OPTIMIZER, value, write, read, index, number, scalar, slot)


def store_others(recipe: Recipe, seen: EagerSteps) -> None:
    """Store what the first step stored in the states of parameters beside tensors and numbers, such as None."""
    names = parameter_names(recipe)
    for index, optimizer in enumerate(recipe.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in seen.others.get((index, names.get(id(parameter), "")), {}).items():
                    optimizer.state[parameter].setdefault(key, copy.copy(value))


def _counter(name: str, index: int, held: dict[str, Any], slot: tuple[int | None, str], first: float) -> Place:
    """The place of a number in a group, or in the attributes of an optimizer. None there is no number yet."""
    key = slot[1]
    unset = key in held and held[key] is None

    def write(new: Any) -> None:
        if new is None and not unset:
            held.pop(key, None)
        else:
            held[key] = new

    def read() -> torch.Tensor | None:
        return None if held.get(key) is None else _tensor(held[key])

    return Place(name, StateForm.OPTIMIZER, _tensor(first), write, read, index, True, slot=slot)


def _tensor(value: Any) -> torch.Tensor:
    """A number of Python is a float64: it counts and divides as Python does."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _unique(places: list[Place]) -> list[Place]:
    """The places with unique names: the later one of two equal names gets a number."""
    taken: set[str] = set()
    for place in places:
        name, count = place.name, 1
        while place.name in taken:
            count += 1
            place.name = f"{name}.{count}"
        taken.add(place.name)
    return places
