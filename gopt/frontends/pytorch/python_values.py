"""Values an optimizer keeps in Python between steps: attributes, options of groups, and all inside its states.

A trace sees tensors. A changing Python value would be a constant of the graph, right in the first steps and wrong
later. Such a value becomes a state, or the optimizer is refused.
"""

from __future__ import annotations

import pickle
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gopt.errors import UnsupportedError
from gopt.frontends.pytorch.value_trees import Keys, is_value
from gopt.text.sanitize import show

Path = tuple[str, ...]
_OF_TORCH = {"defaults", "state", "param_groups", "_opt_called", "_zero_grad_profile_name"}
Home = str | int | None
"""Where an optimizer keeps a value: the state of a parameter by its name, a group by its number, UNOWNED, or None for
attributes."""
UNOWNED = -1
"""Home of states that belong to no parameter, such as ``optimizer.state['k']``."""
TRACED = "a value of the graph"
"""Stands for a traced tensor."""
_ABSENT = "absent"
_DEPTH = 50


def python_values(optimizer: torch.optim.Optimizer, names: Mapping[int, str], traced: bool = False) -> dict[Path, Any]:
    """Path -> value, tensors copied, without parameters and states: tensors and numbers in the state of a parameter.
    ``names``: id of a parameter -> name. The length represents a container; with ``traced`` TRACED a traced tensor."""
    values_at: dict[Path, Any] = {}
    walk = _OfTrace(names) if traced else _OfOptimizers(names)
    for key, value in own_attributes(optimizer).items():
        values_at.update(walk.values((f"attribute {key}",), value))
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                values_at.update(walk.values((f"group {number}", str(key)), value))
    for owner, state in optimizer.state.items():
        label = names.get(id(owner), "") if isinstance(owner, torch.Tensor) else str(owner)
        rest = {key: inner for key, inner in state.items() if not is_value(inner)} if isinstance(state, dict) else state
        values_at.update(walk.values((f"state {label}",), rest))
        if isinstance(state, dict):
            values_at[f"state {label}", "keys"] = sorted(map(str, state))
    return values_at


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer other than torch's own."""
    return {key: value for key, value in vars(optimizer).items() if key not in _OF_TORCH and "hook" not in key}


def path_of(home: Home, keys: Keys) -> Path:
    """The path of a value in ``python_values``."""
    first, *rest = map(str, keys)
    if home is None:
        return f"attribute {first}", *rest
    if home == UNOWNED:
        return f"state {first}", *rest
    return f"{'state' if isinstance(home, str) else 'group'} {home}", first, *rest


def changed(before: Mapping[Path, Any], after: Mapping[Path, Any]) -> Iterator[tuple[Path, Any, Any]]:
    """Yield the paths whose values differ, with both values."""
    for path in dict.fromkeys((*before, *after)):
        old, new = before.get(path, _ABSENT), after.get(path, _ABSENT)
        if not equal(old, new):
            yield path, old, new


def equal(old: Any, new: Any) -> bool:
    """Return whether two values are the same: tensors of equal elements, values of a type."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return old.shape == new.shape and torch.equal(old, new)
    return type(old) is type(new) and bool(old == new or old != old)


def said(path: Path) -> str:
    """Return a path in words."""
    return ", ".join(path)


class Walk:
    """Walks Python objects, each once; subclasses choose objects to leave out."""

    whole: tuple[type, ...] = (type, types.ModuleType, torch.nn.Module, torch.optim.Optimizer)
    """Not walked: a part of the step that is compared as a whole, or that holds nothing."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # what was walked, so that no later object has its id

    def values(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        """Yield path and value of everything below ``value``; the length stands for a container."""
        if isinstance(value, torch.Tensor):
            yield from self.tensor(path, value)
        elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
            yield path, value
        elif not isinstance(value, self.whole) and self.enters(path, value) and self.is_new(value):
            yield from self._inside(path, value)

    def is_new(self, value: Any) -> bool:
        """Return whether an object was not asked for before."""
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._kept.append(value)
        return True

    def tensor(self, path: Path, value: torch.Tensor) -> Iterator[tuple[Path, Any]]:
        """Yield the representation of a tensor."""
        raise NotImplementedError

    def enters(self, path: Path, value: Any) -> bool:
        """Return whether a container or an object is walked."""
        raise NotImplementedError

    def key(self, key: Any) -> str:
        """Return the name of a key of a mapping."""
        return str(key)

    def members(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield what an object holds by name."""
        return members(value)

    def elements(self, value: Any) -> Iterable[Any]:
        """Return the walked parts of a container: pairs of a mapping, elements of others."""
        return value.items() if isinstance(value, Mapping) else value

    def _inside(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, Mapping):
            yield (*path, "length"), len(value)
            for key, inner in self.elements(value):
                yield from self.values((*path, self.key(key)), inner)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            yield (*path, "length"), len(value)
            for index, inner in enumerate(self.elements(value)):
                yield from self.values((*path, str(index)), inner)
        else:
            for key, inner in self.members(value):
                yield from self.values((*path, key), inner)


class _OfOptimizers(Walk):
    """``names``: id of a parameter -> name."""

    whole = (*Walk.whole, torch.dtype, torch.device)

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def tensor(self, path: Path, value: torch.Tensor) -> Iterator[tuple[Path, Any]]:
        if id(value) not in self._names:
            yield path, value._version if isinstance(value, FakeTensor) else value.detach().clone()

    def enters(self, path: Path, value: Any) -> bool:
        if len(path) > _DEPTH:
            raise UnsupportedError(
                f"an optimizer keeps values {_DEPTH} levels deep, in {show(said(path))}", "keep them nearer, as tensors"
            )
        return True

    def key(self, key: Any) -> str:
        return self._names.get(id(key), str(key))


class _OfTrace(_OfOptimizers):
    """Traced tensors have no values, and other tensors are known by their version."""

    def tensor(self, path: Path, value: torch.Tensor) -> Iterator[tuple[Path, Any]]:
        if id(value) not in self._names:
            yield path, TRACED if isinstance(value, FunctionalTensor) else value._version


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds by name: attributes, slots, variables of a closure or generator. An object of another
    kind, such as ``itertools.count``, has its pickle as the only member, or its text."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            with suppress(ValueError):  # a variable that is not set yet
                yield name, cell.cell_contents
    elif isinstance(value, types.MethodType):
        yield "function", value.__func__
        yield "object", value.__self__
    elif isinstance(value, types.GeneratorType):
        yield "place", value.gi_frame.f_lasti if value.gi_frame else None
        yield "variables", dict(value.gi_frame.f_locals) if value.gi_frame else {}
    else:
        slots = [name for base in type(value).__mro__ for name in _names(getattr(base, "__slots__", ()))]
        attrs = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
        yield from attrs.items()
        if not attrs and not isinstance(value, types.BuiltinFunctionType):
            yield "content", _content(value)


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slot for slot in slots if not slot.startswith("__"))


def _content(value: Any) -> Any:
    try:
        return pickle.dumps(value)
    except Exception:  # locks, files, and the like
        return repr(value)
