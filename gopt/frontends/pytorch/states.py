"""The values that a training step carries from step to step, and their values before the first one."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.factory import Recipe
from gopt.sanitize import show


class Kind(Enum):
    """The role of the tensor at a place."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer state"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A frozen parameter, or a buffer that no step changes."""


@dataclass(slots=True)
class Place:
    """A tensor of training code that can be replaced by another.

    ``value``: its value before the first step. ``read`` returns None where the optimizer has not stored it yet, and
    ``write`` removes it if given None. ``owner``: index of the optimizer that updates it, None for buffers and
    constants.
    """

    name: str
    kind: Kind
    value: torch.Tensor
    write: Callable[[torch.Tensor | None], None]
    read: Callable[[], torch.Tensor | None]
    owner: int | None = None

    @property
    def current(self) -> torch.Tensor:
        """The current tensor, or its value before the first step."""
        found = self.read()
        return self.value if found is None else found


@dataclass(slots=True)
class FirstStep:
    """Values that the first eager step, taken by a copy, stored.

    ``states``: by optimizer, parameter name and key, the value before the first step. ``counters``: by optimizer and
    group, numeric options that changed, with their first value. ``buffers``: names of buffers that changed.
    """

    states: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    counters: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)


class _Recorded(dict[str, Any]):
    """The state of one parameter. ``first``: the value of every key before the first step.

    That is the first that was stored, before updates in place. What is stored behind the parameter's own update, such
    as SGD's momentum, comes out of the step: it is zero before.
    """

    def __init__(self, parameter: torch.Tensor, given: MutableMapping[str, Any] | None = None) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self._parameter = parameter
        self._before = _kept(parameter)
        for key, value in (given or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            updated = _changed(self._parameter, self._before)
            self.first[key] = _zero(value) if updated else _copy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **named: Any) -> None:
        for key, value in dict(*given, **named).items():
            self[key] = value


class _RecordedStates(dict[Any, Any]):
    """The states of an optimizer."""

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, torch.Tensor) and not isinstance(value, _Recorded):
            value = _Recorded(key, value)
        super().__setitem__(key, value)


def first_step(recipe: Recipe, step: Callable[[Recipe], None]) -> FirstStep:
    """Take one ``step`` with a copy of a recipe and record what it stores; raises UnsupportedError for states that
    belong to no parameter."""
    tried = copy.deepcopy(recipe)
    names = parameter_names(tried)
    before = {name: _kept(value) for name, value in tried.module.named_buffers(remove_duplicate=False)}
    groups = [[_numbers(group) for group in optimizer.param_groups] for optimizer in tried.optimizers]
    for optimizer in tried.optimizers:
        kept = dict(optimizer.state)
        optimizer.state = _RecordedStates()
        for parameter, state in kept.items():
            optimizer.state[parameter] = state
    step(tried)
    found = FirstStep()
    for index, optimizer in enumerate(tried.optimizers):
        for parameter, state in optimizer.state.items():
            if not isinstance(parameter, torch.Tensor) or id(parameter) not in names:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps a state {show(str(parameter))} that belongs to no parameter",
                    "such an optimizer cannot be exported",
                )
            found.states[index, names[id(parameter)]] = {
                key: state.first[key] for key, value in state.items() if _is_value(value)
            }
        for place, (group, old) in enumerate(zip(optimizer.param_groups, groups[index])):
            changed = {key: old[key] for key, value in _numbers(group).items() if old.get(key, value) != value}
            changed.pop("lr", None)
            if changed:
                found.counters[index, place] = changed
    found.buffers = {
        name
        for name, value in tried.module.named_buffers(remove_duplicate=False)
        if name in before and _changed(value, before[name])
    }
    return found


def find_places(recipe: Recipe, seen: FirstStep) -> list[Place]:
    """Every place of a recipe: parameters, optimizer states, buffers, constants. Raises UnsupportedError where
    nothing is trained."""
    parameters, constants = _parameters(recipe)
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
            places += [_counter(index, place, group, key, value) for key, value in counters.items()]
    for spots in _homes(recipe.module, "_buffers").values():
        held, key, name = spots[0]
        kind = Kind.BUFFER if any(spot[2] in seen.buffers for spot in spots) else Kind.CONSTANT
        places.append(_module_place(name, kind, held[key], spots))
    return [*_unique(places), *constants]


def parameter_names(recipe: Recipe) -> dict[int, str]:
    """Id of each parameter -> its first name."""
    return {key: spots[0][2] for key, spots in _homes(recipe.module, "_parameters").items()}


def _parameters(recipe: Recipe) -> tuple[list[Place], list[Place]]:
    """Parameters that an optimizer updates, and all others."""
    owners = {
        id(parameter): index
        for index, optimizer in enumerate(recipe.optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trained, constant = [], []
    for key, spots in _homes(recipe.module, "_parameters").items():
        held, own, name = spots[0]
        value = held[own]
        if value.requires_grad and key in owners:
            trained.append(_module_place(name, Kind.PARAMETER, value, spots, owners[key]))
        else:
            constant.append(_module_place(name, Kind.CONSTANT, value, spots))
    known = {id(place.read()) for place in trained}
    lost = next((key for key in owners if key not in known and key not in map(_id_of, constant)), None)
    if lost is not None:
        raise UnsupportedError(
            "the optimizer has a parameter that is not in the module", "register it in the module that is returned"
        )
    return trained, constant


def _id_of(place: Place) -> int:
    return id(place.read())


def _homes(module: torch.nn.Module, kind: str) -> dict[int, list[tuple[dict[str, Any], str, str]]]:
    """Tensor id -> (owner's dict, key, full name) of all parameters or buffers; a tied tensor has several."""
    found: dict[int, list[tuple[dict[str, Any], str, str]]] = defaultdict(list)
    for prefix, owner in module.named_modules():
        held = getattr(owner, kind)
        for key, value in held.items():
            if value is not None:
                found[id(value)].append((held, key, f"{prefix}.{key}" if prefix else key))
    return found


def _module_place(name: str, kind: Kind, value: torch.Tensor, spots: Any, owner: int | None = None) -> Place:
    def write(new: torch.Tensor | None) -> None:
        for held, key, _ in spots:
            held[key] = new

    return Place(name, kind, value.detach(), write, lambda: spots[0][0][spots[0][1]], owner)


def _states_of(
    optimizer: torch.optim.Optimizer, index: int, parameter: torch.Tensor, owner: Place, seen: FirstStep
) -> Iterator[Place]:
    """Places in the state of one parameter, whose dict stays the same object when its parameter is swapped."""
    held = optimizer.state[parameter]
    for key, first in seen.states.get((index, owner.name), {}).items():
        value = first.clone() if isinstance(first, torch.Tensor) else torch.tensor(float(first))

        def write(new: torch.Tensor | None, key: str = key) -> None:
            if new is None:
                held.pop(key, None)
            else:
                held[key] = new

        def read(key: str = key) -> torch.Tensor | None:
            return _tensor(held[key]) if key in held else None

        yield Place(f"{owner.name}.{key}", Kind.OPTIMIZER, value, write, read, index)


def _counter(index: int, place: int, group: dict[str, Any], key: str, first: float) -> Place:
    def write(new: torch.Tensor | None) -> None:
        group[key] = new

    name = f"optimizer{index}.group{place}.{key}"
    return Place(name, Kind.OPTIMIZER, torch.tensor(float(first)), write, lambda: _tensor(group[key]), index)


def _tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    return {key: value for key, value in group.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _kept(value: torch.Tensor) -> torch.Tensor | int:
    """A copy for a later comparison; for a tensor without values, its version counter."""
    return value._version if isinstance(value, FakeTensor) else value.detach().clone()


def _changed(value: torch.Tensor, before: torch.Tensor | int) -> bool:
    if isinstance(before, int):
        return value._version != before
    return not torch.equal(value.detach(), before)


def _zero(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return type(value)(0) if _is_number(value) else value


def _is_value(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or _is_number(value)


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
