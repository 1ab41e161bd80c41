"""Two eager steps of an optimizer show its states, first values, and changes in Python."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.carried_values import (
    CarriedValue,
    Spot,
    carried_values,
    copied,
    held_values,
    home_table,
    late_value,
    parameter_states,
    paths_of,
)
from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.python_values import Home, Path, changed, path_of, python_values, said
from gopt.frontends.pytorch.rates import LR, moved_options
from gopt.frontends.pytorch.reads import user_line
from gopt.frontends.pytorch.surroundings import surroundings, tensors_around
from gopt.frontends.pytorch.value_trees import Keys, find, is_number, is_value, leaves, mapped
from gopt.text.sanitize import show


@dataclass(slots=True)
class EagerSteps:
    """Values the first eager step, taken by a copy, stored.

    ``states``: by optimizer, parameter name and key, the value before the first step. ``nested``: values in containers
    of a parameter's state, likewise. ``carried``: by optimizer and home, other values that steps change, such as
    options of groups. ``containers``: by optimizer, home and key, dicts, lists and
    tuples with carried values behind the first step. ``buffers``: names of buffers and frozen parameters written by
    code. ``read``: optimizer, parameter name and key of states with values read by code. ``others``: other contents of
    states than tensors and numbers. ``selections``: operator with a result shape depending on values -> the calling
    line. ``around``: places of tensors read by the first step, other than the recipe modules' own.
    """

    states: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    nested: dict[tuple[int, str], dict[Keys, Any]] = field(default_factory=dict)
    carried: dict[int, list[CarriedValue]] = field(default_factory=dict)
    containers: dict[tuple[int, Home, Hashable], Any] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    read: set[tuple[int, str, str]] = field(default_factory=set)
    others: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    selections: dict[str, str] = field(default_factory=dict)
    around: set[Path] = field(default_factory=set)

    def add_carried(self, index: int, optimizer: torch.optim.Optimizer, values: Sequence[CarriedValue]) -> None:
        """Add values that an optimizer carries, with their containers."""
        self.carried.setdefault(index, []).extend(values)
        for home, keys in (spot for value in values for spot in value.spots):
            self.containers[index, home, keys[0]] = mapped(home_table(optimizer, home).get(keys[0]), copied)

    def add_late(self, recipe: Recipe, optimizer: torch.optim.Optimizer, spots: Sequence[Spot]) -> None:
        """Add values that steps behind the second change."""
        index = recipe.optimizers.index(optimizer)
        for path in (path_of(*spot) for spot in spots):
            if _moved(index, recipe)(path):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} and a scheduler both change {show(said(path))}",
                    "let the scheduler alone change it",
                )
        self.add_carried(index, optimizer, [late_value(spot, optimizer) for spot in spots])


class _Recorded(dict[str, Any]):
    """The state of a parameter. ``first``: the value of every key before the first step: the first stored value, before
    updates in place. Values stored after the parameter's own update, such as SGD's momentum, are results of the step:
    zero before."""

    def __init__(self, parameter: torch.Tensor, state: MutableMapping[str, Any] | None = None) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self._parameter = parameter
        self._before = _kept(parameter)
        for key, value in (state or {}).items():
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

    def update(self, *args: Any, **named: Any) -> None:
        for key, value in dict(*args, **named).items():
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


class _Reads(TorchDispatchMode):
    """Records tensors with values turned into numbers: by ``item()`` and the like, or in a fused kernel.
    ``selections``: as in EagerSteps. ``watched``: ids of tensors; ``operands``: those used by an operator, with the
    line of the first use. ``before``: id of a tensor an optimizer changed in place -> tensor, and value before;
    ``updating``: whether an optimizer has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the tensor stays, so that its id is its own
        self.updating = False
        self.found: dict[int, torch.Tensor] = {}
        self.selections: dict[str, str] = {}
        self.watched: set[int] = set()
        self.operands: dict[int, str] = {}

    def begin_update(self, *_: Any) -> None:
        """Called before ``step`` of an optimizer."""
        self.updating = True

    def initial(self, value: Any) -> Any:
        """A copy of a value, before the optimizer's changes in place."""
        return self.before[id(value)][1] if id(value) in self.before else _copy(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watched:
            for leaf in tree_leaves((args, kwargs)):
                if id(leaf) in self.watched and id(leaf) not in self.operands:
                    self.operands[id(leaf)] = user_line()
        if func is torch.ops.aten._local_scalar_dense.default or "_fused_" in str(func):
            named = dict(zip((argument.name for argument in func._schema.arguments), args)) | (kwargs or {})
            leaves = tree_leaves(named.get("state_steps", (args, kwargs)))  # a fused update reads the counts of steps
            self.found |= {id(part): part for part in leaves if isinstance(part, torch.Tensor)}
        for argument, value in zip(func._schema.arguments, args):
            if self.updating and argument.is_write and isinstance(value, torch.Tensor) and id(value) not in self.before:
                self.before[id(value)] = value, value.detach().clone()
        if torch.Tag.dynamic_output_shape in func.tags:
            self.selections.setdefault(str(func), user_line())
        return func(*args, **(kwargs or {}))


def eager_steps(recipe: Recipe, run_first: Callable[[Recipe], None], second: Callable[[Recipe], None]) -> EagerSteps:
    """Take two steps with a copy of a recipe and record the stored values.

    Raises UnsupportedError for states of no parameter, and for changed Python values, other than numbers of groups and
    attributes of an optimizer, which have no place in a graph.
    """
    tried = copy.deepcopy(recipe)
    names = parameter_names(tried)
    before = {name: (value, value._version, _kept(value)) for name, value in _untrained(tried)}
    for optimizer in tried.optimizers:
        states_before = dict(optimizer.state)
        optimizer.state = _RecordedStates()
        for parameter, state in states_before.items():
            optimizer.state[parameter] = state
    begun = [_copies(optimizer) for optimizer in tried.optimizers]
    zero = [held_values(optimizer, names) for optimizer in tried.optimizers]
    reads = _Reads()
    hooks = [optimizer.register_step_pre_hook(reads.begin_update) for optimizer in tried.optimizers]
    originals = [(parameter, parameter.grad, parameter._version) for parameter in recipe.whole.parameters()]
    beside = tensors_around(tried)
    reads.watched = set(map(id, beside.values()))
    with reads:
        run_first(tried)
    reads.updating = False
    for hook in hooks:
        hook.remove()
    if any(parameter.grad is not grad or parameter._version != version for parameter, grad, version in originals):
        raise UnsupportedError(
            "the step trains the module that the factory made by another way than the one it is given: a global name",
            "let the loss function compute with its argument",
        )
    steps = EagerSteps(around={path for path, value in beside.items() if id(value) in reads.operands})
    for index, optimizer in enumerate(tried.optimizers):
        for parameter, state in parameter_states(optimizer).items():
            if id(parameter) not in names:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} keeps a state of a tensor of shape {list(parameter.shape)} that is no "
                    "parameter of the module",
                    "such an optimizer cannot be exported",
                )
            name = names[id(parameter)]
            steps.states[index, name] = {key: state.first[key] for key, value in state.items() if is_value(value)}
            steps.others[index, name] = containers = {
                key: mapped(value, copied) for key, value in state.items() if not is_value(value)
            }
            inside = [pair for key in containers for pair in leaves(state[key], (key,))]
            stored_before = begun[index].get(parameter)
            steps.nested[index, name] = {
                keys: reads.initial(value) if find(stored_before, keys) is None else find(stored_before, keys)
                for keys, value in inside
            }
    behind_one = [held_values(optimizer, names, reads.initial) for optimizer in tried.optimizers]
    middle = [python_values(optimizer, names) for optimizer in tried.optimizers]
    around = surroundings(tried)
    stored = [{key: dict(state) for key, state in parameter_states(one).items()} for one in tried.optimizers]
    trained = {id(parameter) for one in tried.optimizers for group in one.param_groups for parameter in group["params"]}
    around_it = tensors_around(tried).items()
    around_before = {path: (value, value._version) for path, value in around_it if id(value) not in trained}
    reads.watched, reads.operands = {id(value) for value, _ in around_before.values()}, {}
    with reads:
        second(tried)
    _refuse_changes(around, surroundings(tried))
    _refuse_carried(around_before, tensors_around(tried), reads.operands)
    steps.selections = reads.selections
    steps.buffers = {name for name, value in _untrained(tried) if name in before and _written(value, *before[name])}
    for index, optimizer in enumerate(tried.optimizers):
        two, moved = held_values(optimizer, names), _moved(index, recipe)
        steps.add_carried(index, optimizer, carried_values(zero[index], behind_one[index], two, moved))
        carried_paths = paths_of(steps.carried[index])
        for parameter, state in parameter_states(optimizer).items():
            name, old = names[id(parameter)], stored[index][parameter]
            firsts = steps.states[index, name]
            for key in firsts:
                pair = old.get(key), state.get(key)
                firsts[key] = _start(firsts[key], *pair)
                if any(id(value) in reads.found for value in pair):
                    steps.read.add((index, name, key))
            steps.nested[index, name] = nested = {
                keys: 2 * start - find(state, keys) if is_number(start) else start
                for keys, start in steps.nested[index, name].items()
                if _carries(start, find(state, keys))
            }
            carried_paths |= {path_of(name, keys) for keys in nested}
        _refuse_others(optimizer, changed(middle[index], python_values(optimizer, names)), carried_paths, moved)
    return steps


def _copies(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]]:
    return {key: mapped(dict(state), copied) for key, state in parameter_states(optimizer).items()}


def _untrained(recipe: Recipe) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers, and parameters no optimizer updates, by all names."""
    trained = {
        id(value) for optimizer in recipe.optimizers for group in optimizer.param_groups for value in group["params"]
        if value.requires_grad
    }  # fmt: skip
    yield from recipe.whole.named_buffers(remove_duplicate=False)
    for name, value in recipe.whole.named_parameters(remove_duplicate=False):
        if id(value) not in trained:
            yield name, value


def _written(value: torch.Tensor, old: torch.Tensor, version: int, before: torch.Tensor | int) -> bool:
    """Return whether code wrote to a tensor, or replaced it, perhaps with equal values: later steps may differ."""
    return value is not old or value._version != version or _changed(value, before)


def _refuse_changes(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> None:
    for path, old, new in changed(before, after):
        raise UnsupportedError(
            f"training code keeps a value in Python that each step changes: {show(said(path))} is {_brief(old)} after "
            f"one step and {_brief(new)} after two",
            "it would be a constant of the graph; keep it as a tensor, in a buffer of a module",
        )


def _refuse_carried(
    before: Mapping[Path, tuple[torch.Tensor, int]], after: Mapping[Path, torch.Tensor], operands: Mapping[int, str]
) -> None:
    """Raise UnsupportedError for a tensor the second step reads, and changes or replaces."""
    for path, (value, version) in before.items():
        untouched = value._version == version and after.get(path) is value
        if id(value) in operands and not untouched:
            raise UnsupportedError(
                f"training code carries a tensor from step to step outside of modules' parameters and buffers: "
                f"{show(said(path))}, read {operands[id(value)]}",
                "the graph would hold its value in the traced step; register it as a buffer of a module (self.register_"
                "buffer) that the factory returns, or as a part of that module",
            )


def _start(start: Any, after_one: Any, after_two: Any) -> Any:
    """The value before the first step, for the first stored value ``start``: a number counted up before storing is
    continued backwards."""
    if is_number(start) and isinstance(after_one, torch.Tensor):  # a number that a tensor replaces
        return torch.full_like(after_one, start)
    if isinstance(start, torch.Tensor) and isinstance(after_one, torch.Tensor) and isinstance(after_two, torch.Tensor):
        # A first step that gives the state another shape stores a value that no later step has before it.
        return torch.zeros_like(after_one) if start.shape != after_one.shape == after_two.shape else start
    counted = is_number(start) and is_number(after_two) and start == after_one != after_two
    return type(start)(2 * start - after_two) if counted else start


def _carries(start: Any, later: Any) -> bool:
    """Return whether a value in a container of a parameter's state is a state: any tensor, and a changed number."""
    if isinstance(start, torch.Tensor):
        return isinstance(later, torch.Tensor) and later.shape == start.shape
    return is_number(later) and start != later


def _moved(index: int, recipe: Recipe) -> Callable[[Path], bool]:
    """A test of paths: is it an option of an optimizer's group that the scheduler moves, and thus an input?"""
    options = {(f"group {group}", option) for home, group, option, _ in moved_options(recipe) if home == index}
    scheduled = recipe.scheduler is not None
    return lambda path: path[:2] in options or (scheduled and path[-1] == LR)


def _refuse_others(
    optimizer: Any, changes: Iterator[tuple[Path, Any, Any]], carried: Container[Path], moved: Callable[[Path], bool]
) -> None:
    """Raise UnsupportedError for a value changed by the second step that is no state and no input."""
    for path, old, new in changes:
        if path not in carried and not moved(path):
            raise UnsupportedError(
                f"{type(optimizer).__name__} keeps a value in Python that each step changes: "
                f"{show(said(path))} is {_brief(old)} after one step and {_brief(new)} after two",
                "it would be a constant of the graph; keep it as a number of a group, or as a tensor in the state of "
                "a parameter",
            )


def _brief(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else show(str(value)[:60])


def parameter_names(recipe: Recipe) -> dict[int, str]:
    """Id of each parameter -> first name."""
    return {key: spots[0][2] for key, spots in tensors_of(recipe.whole, "_parameters").items()}


def tensors_of(module: torch.nn.Module, kind: str) -> dict[int, list[tuple[dict[str, Any], str, str]]]:
    """Tensor id -> (owner's dict, key, full name) of all parameters or buffers; a tied tensor has several."""
    tensors: dict[int, list[tuple[dict[str, Any], str, str]]] = defaultdict(list)
    for prefix, owner in module.named_modules():
        table = getattr(owner, kind)
        for key, value in table.items():
            if value is not None:
                tensors[id(value)].append((table, key, f"{prefix}.{key}" if prefix else key))
    return tensors


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
    return type(value)(0) if is_number(value) else value
