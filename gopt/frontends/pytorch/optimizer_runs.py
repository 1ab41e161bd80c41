"""Runs the optimizers of a step on traced tensors."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.branches import PATHS, Branches
from gopt.frontends.pytorch.carried_values import Spot, late_spots, spots_of
from gopt.frontends.pytorch.eager_steps import EagerSteps
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.python_numbers import PythonNumbers
from gopt.frontends.pytorch.python_values import TRACED, Path, changed, own_attributes, path_of, python_values, said
from gopt.frontends.pytorch.randomness import ReplayedDraws
from gopt.frontends.pytorch.reads import no_reads
from gopt.frontends.pytorch.states import Place, StateForm, store_others
from gopt.frontends.pytorch.value_trees import fresh
from gopt.text.sanitize import show


@dataclass(frozen=True, slots=True)
class OptimizerTracing:
    """The way of tracing optimizers. ``apart``: optimizers with the first step traced apart. ``lists``: whether
    third-party optimizers choose between lists of tensors and single tensors. ``paths``: most paths through the code of
    an optimizer that branches."""

    apart: frozenset[int] = frozenset()
    lists: bool = False
    paths: int = PATHS


def chooses_lists(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a third-party optimizer may work on lists of tensors (``torch._foreach_...``)."""
    options = [*optimizer.param_groups, vars(optimizer)]
    theirs = type(optimizer).__module__.startswith("torch.optim")
    return not theirs and any(group.get("foreach", False) is not False for group in options)


def started(index: int) -> str:
    """The name of the step counter of an optimizer with a separate first step."""
    return f"optimizer{index}.started"


def run_optimizers(
    recipe: Recipe, cells: Sequence[Place], eager: EagerSteps, way: OptimizerTracing, absent: set[str],
    values: Mapping[str, torch.Tensor], branches: Branches, draws: ReplayedDraws,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Update every place, and return the new value of each.

    ``absent``: names of places the user's optimizers do not hold yet.
    """
    runs = [
        _OptimizerRun(optimizer, [cell for cell in cells if cell.owner == index], branches, draws)
        for index, optimizer in enumerate(recipe.optimizers)
    ]
    started_values: dict[str, torch.Tensor] = {}
    for index in sorted(way.apart):
        started_values |= runs[index].values(absent)
        runs[index].restore()
    store_others(recipe, eager)
    new = {cell.name: _new_value(cell) for cell in cells if cell.owner is None}
    for index, optimizer in enumerate(recipe.optimizers):
        owned = [cell for cell in cells if cell.owner == index]
        new |= _OptimizerRun(optimizer, owned, branches, draws).values()
    for state in cells:
        if state.name in started_values:
            assert state.owner is not None
            was = values[started(state.owner)] == 0
            new[state.name] = torch.where(was, started_values[state.name], new[state.name])
    return {cell.name: new[cell.name] for cell in cells}


def _new_value(cell: Place) -> torch.Tensor:
    current = cell.current
    if any(read() is not cell.read() for read in cell.aliases):
        raise UnsupportedError(
            f"{show(cell.name)} stands in several places before a step, and the step makes different tensors of them",
            "keep a tensor for each place from the first step on",
        )
    value = current.detach().to(cell.value.dtype)
    return (value.reshape(()) if cell.number else value).clone()


class LateStates(Exception):
    """Steps change values that the first two eager steps did not change."""

    def __init__(self, optimizer: torch.optim.Optimizer, spots: list[Spot]) -> None:
        super().__init__("a value of an optimizer becomes a state")
        self.optimizer, self.spots = optimizer, spots


class _OptimizerRun:
    """Steps of an optimizer from the same traced values and gradients. ``cells``: updated places."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, cells: Sequence[Place], branches: Branches, draws: ReplayedDraws
    ) -> None:
        self._optimizer, self._cells, self._branches, self._draws = optimizer, cells, branches, draws
        self._before = {cell.name: cell.current.detach().clone() for cell in cells}
        self._gradients = {cell.name: _gradient(cell) for cell in cells if cell.kind is StateForm.PARAMETER}
        self._tables = [(table, _contents(table)) for table in _tables(optimizer)]
        self._keys, self._drawn = set(optimizer.state), draws.taken
        self._attributes = {key: fresh(value) for key, value in own_attributes(optimizer).items()}
        self._held = dict(spots_of(optimizer))
        self._slots = {slot for cell in cells for slot in cell.slots}
        self._start = self._marks()
        self._begun = False

    def values(self, absent: Container[str] = ()) -> dict[str, torch.Tensor]:
        """The new value of each cell, behind every path; ``absent``: names of cells without a value."""
        ends: list[Any] = []

        def run() -> dict[str, torch.Tensor]:
            if self._begun:
                self.restore()
            self._begun = True
            for cell in self._cells:
                if cell.name in absent:
                    cell.write(None)
            numbers = [cell.current for cell in self._cells if cell.number and cell.name not in absent]
            numbers += [value for spot, value in self._held.items() if _is_input(value) and spot not in self._slots]
            reader = type(self._optimizer).__name__
            decide = self._branches.decide if self._branches.paths > 1 else None
            with no_reads(reader, decide=decide), PythonNumbers(numbers):
                self._optimizer.step()
            if late := late_spots(self._held, self._optimizer, self._slots):
                raise LateStates(self._optimizer, late)
            ends.append(self._marks())
            _refuse_traced(reader, self._start, ends[-1])
            if len(ends) > 1:
                _refuse_difference(reader, ends[0], ends[-1])
            return {cell.name: _new_value(cell) for cell in self._cells}

        return self._branches.explored(type(self._optimizer).__name__, run)

    def restore(self) -> None:
        """Bring the optimizer back to before the step."""
        self._draws.taken = self._drawn
        for key in self._optimizer.state.keys() - self._keys:
            del self._optimizer.state[key]
        for key in own_attributes(self._optimizer).keys() - self._attributes.keys():
            del vars(self._optimizer)[key]
        vars(self._optimizer).update({key: fresh(value) for key, value in self._attributes.items()})
        for table, contents in self._tables:
            for key in _contents(table).keys() - contents.keys():
                del table[key]
            table.update({key: fresh(value) for key, value in contents.items()})
        for cell in self._cells:
            if cell.kind is not StateForm.PARAMETER:
                cell.write(self._before[cell.name].clone())
            elif (parameter := cell.read()) is not None:
                with torch.no_grad():
                    parameter.copy_(self._before[cell.name])
                gradient = self._gradients[cell.name]
                parameter.grad = None if gradient is None else gradient.clone()

    def _marks(self) -> dict[Path, Any]:
        """Marks of a step in Python: the number of draws, and values outside of the cells."""
        names = {id(cell.read()): cell.name for cell in self._cells if cell.kind is StateForm.PARAMETER}
        of_cells = {path_of(*slot) for slot in self._slots}
        rest = {
            path: value for path, value in python_values(self._optimizer, names, traced=True).items()
            if path not in of_cells
        }  # fmt: skip
        return {("draws",): self._draws.taken, **rest}


def _tables(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    return [*optimizer.param_groups, *states, optimizer.state]


def _contents(table: Mapping[Any, Any]) -> dict[Any, Any]:
    """The values of a table, with new containers."""
    return {key: fresh(value) for key, value in table.items() if not isinstance(key, torch.Tensor) and key != "params"}


def _is_input(value: Any) -> bool:
    """Return whether a number of Python is an input of the graph."""
    return isinstance(value, FunctionalTensor) and not value.dim()


def _refuse_traced(reader: str, start: Mapping[Path, Any], end: Mapping[Path, Any]) -> None:
    for path, value in end.items():
        if value is TRACED and start.get(path) is not TRACED:
            raise UnsupportedError(
                f"{reader} changes a value that its first two steps leave as it is: {show(said(path))}",
                "it would be a constant of the graph; keep it as a tensor in the state of a parameter",
            )


def _refuse_difference(reader: str, then: Mapping[Path, Any], orelse: Mapping[Path, Any]) -> None:
    for path, old, new in changed(then, orelse):
        raise UnsupportedError(
            f"{reader} branches on a value that the graph computes, and the sides leave different values in Python: "
            f"{show(said(path))} is {show(str(old)[:60])} or {show(str(new)[:60])}",
            "it would be a constant of the graph; keep it as a tensor in the state of a parameter",
        )


def _gradient(cell: Place) -> torch.Tensor | None:
    parameter = cell.read()
    return None if parameter is None or parameter.grad is None else parameter.grad.clone()
