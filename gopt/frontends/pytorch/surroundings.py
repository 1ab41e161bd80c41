"""Values that training code keeps in Python beside its optimizers: attributes of modules and of classes, globals and
closures of the functions.

A trace has no place for such values. A changing number would be a constant of the graph, and is refused. Modules keep
tensors there as well: results of a step, such as an auxiliary loss, made anew by the next step. A tensor read and
changed by the next step is refused, too.
"""

from __future__ import annotations

import logging
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from gopt.frontends.pytorch.factory import Recipe
from gopt.frontends.pytorch.python_values import Path, Walk, members

_DEPTH = 12
_LONG = 1000
"""Containers of more elements are known by their length alone."""
_OF_MODULES = frozenset(vars(torch.nn.Module()))


def surroundings(recipe: Recipe) -> dict[Path, Any]:
    """Path -> value, of numbers, texts, truth values, and lengths of containers."""
    return _walked(recipe, _UserObjects())


def tensors_around(recipe: Recipe) -> dict[Path, torch.Tensor]:
    """Path -> tensor other than parameters and buffers of the recipe's modules."""
    walked = _walked(recipe, _Tensors(recipe))
    return {path: value for path, value in walked.items() if isinstance(value, torch.Tensor)}


def _walked(recipe: Recipe, walk: _UserObjects) -> dict[Path, Any]:
    values: dict[Path, Any] = {}
    for name, module in recipe.whole.named_modules():
        attributes = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
        values.update(walk.held((f"module {name or type(module).__name__}",), attributes))
    for owner in {type(owner): None for owner in (*recipe.optimizers, *recipe.whole.modules())}:
        for base in owner.__mro__:
            if not _of_torch(base.__module__) and base is not object:
                values.update(walk.held((f"class {base.__name__}",), vars(base)))
                for value in vars(base).values():
                    values.update(walk.function(value))
    if recipe.loss is not None and not isinstance(recipe.loss, torch.nn.Module):
        values.update(walk.values(("loss",), recipe.loss))
        values.update(walk.function(type(recipe.loss).__call__))
    return values


class _UserObjects(Walk):
    """Objects of the user alone; a function is known by its reads."""

    whole = (*Walk.whole, types.BuiltinFunctionType, logging.Logger)

    def values(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, types.FunctionType | types.MethodType):
            return self.function(value)
        return super().values(path, value)

    def held(self, path: Path, values: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
        """Yield the values of names, except Python's own."""
        for key, value in values.items():
            if not key.startswith("__"):
                yield from self.values((*path, key), value)

    def function(self, function: Any) -> Iterator[tuple[Path, Any]]:
        """Yield globals and closures of a function, and of functions called by name."""
        if isinstance(function, types.MethodType):
            yield from self.held((f"object of {function.__name__}",), {"self": function.__self__})
            function = function.__func__
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, types.FunctionType) or _of_torch(function.__module__) or not self.is_new(function):
            return
        code = function.__code__
        filled = dict(_filled(zip(code.co_freevars, function.__closure__ or ())))
        read = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for kind, values in (("closure", filled), ("global", read)):
            yield from self.held((f"{kind} of {function.__name__}",), values)
            for value in values.values():
                yield from self.function(value)

    def tensor(self, path: Path, value: torch.Tensor) -> Iterator[tuple[Path, Any]]:
        return iter(())

    def enters(self, path: Path, value: Any) -> bool:
        return len(path) <= _DEPTH and (isinstance(value, _CONTAINERS) or not _of_torch(type(value).__module__))

    def elements(self, value: Any) -> Iterable[Any]:
        return super().elements(value) if len(value) <= _LONG else ()

    def members(self, value: Any) -> Iterator[tuple[str, Any]]:
        return ((key, inner) for key, inner in members(value) if not key.startswith("__"))


class _Tensors(_UserObjects):
    """Tensors, including the tensors of modules outside of the recipe."""

    whole = tuple(kind for kind in _UserObjects.whole if kind is not torch.nn.Module)

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        for owner in (*recipe.whole.modules(), *recipe.whole.parameters(), *recipe.whole.buffers()):
            self.is_new(owner)

    def values(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        if not isinstance(value, torch.nn.Module):
            yield from super().values(path, value)
        elif self.is_new(value):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                yield from self.tensor((*path, name), tensor)

    def tensor(self, path: Path, value: torch.Tensor) -> Iterator[tuple[Path, Any]]:
        if self.is_new(value):
            yield path, value


_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)


def _filled(cells: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, cell in cells:
        with suppress(ValueError):  # a variable that is not set yet
            yield name, cell.cell_contents


def _of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "builtins", "gopt", "_thread", "threading")
