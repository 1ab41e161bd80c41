"""The values carried by a training step from step to step, and the values before the first step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.carried_values import Spot, home_table
from gopt.frontends.pytorch.eager_steps import EagerSteps, parameter_names, tensors_of
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.python_values import UNOWNED
from gopt.frontends.pytorch.value_trees import dotted, find, mapped, put


class StateForm(Enum):
    """The role of the tensor at a place."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer state"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A frozen parameter, or a buffer that no step changes."""


@dataclass(slots=True)
class Place:
    """A replaceable tensor of training code.

    ``value``: before the first step. ``read`` gives None before the optimizer has stored the tensor, and ``write`` of
    None removes it. ``owner``: index of the updating optimizer, None for buffers and constants. ``number``: whether a
    Python number. ``is_scalar``: whether eager code takes ``item()``, such as of a count, and computes in float64,
    where ``1 - 0.999 ** count`` keeps its digits. ``slots``: for a state of an optimizer, home and keys,
    several for a tensor in several containers. ``aliases``: read all slots but the first. ``container``: the outermost
    container with the state, behind the first step.
    """

    name: str
    kind: StateForm
    value: torch.Tensor
    write: Callable[[Any], None]
    read: Callable[[], torch.Tensor | None]
    owner: int | None = None
    number: bool = False
    is_scalar: bool = False
    slots: tuple[Spot, ...] = ()
    aliases: tuple[Callable[[], torch.Tensor | None], ...] = ()
    container: Any = None

    def store(self) -> None:
        """Write the value before the first step, as a number if it is a number."""
        if not self.number:
            self.write(self.value.clone())
            return
        number = float(self.value)
        self.write(int(number) if number.is_integer() else number)

    @property
    def current(self) -> torch.Tensor:
        """The current tensor, or the value before the first step."""
        tensor = self.read()
        return self.value if tensor is None else tensor


def find_places(recipe: Recipe, eager: EagerSteps) -> list[Place]:
    """Every place of a recipe: parameters, optimizer states, buffers, constants. Raises UnsupportedError where
    nothing is trained."""
    parameters, constants = _parameters(recipe, eager)
    if not parameters:
        raise UnsupportedError(
            "the optimizer has no parameter that needs a gradient", "give it module.parameters(), with requires_grad"
        )
    owners = {id(cell.read()): cell for cell in parameters}
    cells = [*parameters]
    for index, optimizer in enumerate(recipe.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = owners.get(id(parameter))
                if owner is not None:
                    cells += _states_of(optimizer, index, parameter, owner, eager)
        cells += _carried(optimizer, index, eager)
    for spots in tensors_of(recipe.whole, "_buffers").values():
        table, key, name = spots[0]
        cells.append(_module_place(name, _kind(spots, eager), table[key], spots))
    return [*_unique(cells), *constants]


def _parameters(recipe: Recipe, eager: EagerSteps) -> tuple[list[Place], list[Place]]:
    """Parameters updated by an optimizer, and all others: constants, or buffers if changed by the module."""
    owners = {
        id(parameter): index
        for index, optimizer in enumerate(recipe.optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    trained, constant = [], []
    for key, spots in tensors_of(recipe.whole, "_parameters").items():
        table, key_of, name = spots[0]
        value = table[key_of]
        if value.requires_grad and key in owners:
            trained.append(_module_place(name, StateForm.PARAMETER, value, spots, owners[key]))
        else:
            constant.append(_module_place(name, _kind(spots, eager), value, spots))
    ids = {id(cell.read()) for cell in trained}
    lost = next((key for key in owners if key not in ids and key not in map(_id_of, constant)), None)
    if lost is not None:
        raise UnsupportedError(
            "the optimizer has a parameter that is not in the module", "register it in the module that is returned"
        )
    return trained, constant


def _kind(spots: Any, eager: EagerSteps) -> StateForm:
    return StateForm.BUFFER if any(spot[2] in eager.buffers for spot in spots) else StateForm.CONSTANT


def _id_of(cell: Place) -> int:
    return id(cell.read())


def _module_place(name: str, kind: StateForm, value: torch.Tensor, spots: Any, owner: int | None = None) -> Place:
    def write(new: torch.Tensor | None) -> None:
        for table, key, _ in spots:
            table[key] = new

    return Place(name, kind, value.detach(), write, lambda: spots[0][0][spots[0][1]], owner)


def _states_of(
    optimizer: torch.optim.Optimizer, index: int, parameter: torch.Tensor, owner: Place, eager: EagerSteps
) -> Iterator[Place]:
    """Places in the state of a parameter; its dict stays the same object when the parameter is swapped."""
    states = optimizer.state[parameter]
    for key, start in eager.states.get((index, owner.name), {}).items():
        number = not isinstance(start, torch.Tensor)
        state = _optimizer_place(f"{owner.name}.{key}", index, lambda: states, (owner.name, (key,)), start, number)
        scalar = not state.value.dim() and state.value.dtype is torch.float32
        if not isinstance(start, FakeTensor):  # of those it is not known what code reads
            scalar = scalar and (index, owner.name, key) in eager.read
        state.is_scalar = scalar
        yield state
    containers = eager.others.get((index, owner.name), {})
    for keys, start in eager.nested.get((index, owner.name), {}).items():
        name, number = f"{owner.name}.{dotted(keys)}", not isinstance(start, torch.Tensor)
        yield _optimizer_place(name, index, lambda: states, (owner.name, keys), start, number, containers[str(keys[0])])


def store_others(recipe: Recipe, eager: EagerSteps) -> None:
    """Store what the first step stored in parameter states beside tensors and numbers, such as None."""
    names = parameter_names(recipe)
    for index, optimizer in enumerate(recipe.optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in eager.others.get((index, names.get(id(parameter), "")), {}).items():
                    optimizer.state[parameter].setdefault(key, copy.copy(value))


def _carried(optimizer: torch.optim.Optimizer, index: int, eager: EagerSteps) -> Iterator[Place]:
    """Places in groups and attributes of an optimizer, and in its states of no parameter."""
    for carried in eager.carried.get(index, ()):
        cells = []
        for home, keys in carried.spots:
            label = f"optimizer{index}." + (f"group{home}." if home not in (None, UNOWNED) else "")
            container = eager.containers[index, home, keys[0]] if len(keys) > 1 else None
            table = functools.partial(home_table, optimizer, home)
            cells.append(
                _optimizer_place(
                    label + dotted(keys), index, table, (home, keys), carried.start, carried.number, container
                )
            )
        cell, *aliases = cells
        if aliases:
            _write_all(cell, [alias.write for alias in cells])
            cell.aliases, cell.slots = tuple(alias.read for alias in aliases), carried.spots
        yield cell


def _write_all(cell: Place, writes: Sequence[Callable[[Any], None]]) -> None:
    def write(new: Any) -> None:
        for write_slot in writes:
            write_slot(new)

    cell.write = write


def _optimizer_place(
    name: str, index: int, table: Callable[[], dict[Any, Any]], slot: Spot, start: Any, number: bool,
    container: Any = None,
) -> Place:  # fmt: skip
    """A place of an optimizer, below a dict. Without a value it is missing, or as None as it is now."""
    keys = slot[1]
    unset = keys[0] in table() and table()[keys[0]] is None

    def write(new: Any) -> None:
        outer = table()
        if new is not None:
            if len(keys) > 1 and find(outer, keys[:-1]) is None:
                outer[keys[0]] = mapped(container)
            put(outer, keys, new)
        elif unset:
            outer[keys[0]] = None
        else:
            outer.pop(keys[0], None)

    def read() -> torch.Tensor | None:
        value = find(table(), keys)
        return None if value is None else _tensor(value)

    value = _tensor(start).clone()
    return Place(name, StateForm.OPTIMIZER, value, write, read, index, number, slots=(slot,), container=container)


def _tensor(value: Any) -> torch.Tensor:
    """A Python number as a float64, which counts and divides as in Python."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _unique(cells: list[Place]) -> list[Place]:
    """The places with unique names: the later of two equal names gets a number."""
    names: set[str] = set()
    for cell in cells:
        name, count = cell.name, 1
        while cell.name in names:
            count += 1
            cell.name = f"{name}.{count}"
        names.add(cell.name)
    return cells
