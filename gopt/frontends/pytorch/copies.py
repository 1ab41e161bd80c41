"""Copies of training code: all that trains, its hooks, and functions holding a part of it.

``copy.deepcopy`` leaves functions as they are and drops the hooks of parameters. A loss function holding the module in
the closure would compute with the original beside a copy that trains.
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_LONG = 1000
"""Containers of more elements are not looked into."""
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that its copy lacks."""


def rebound(value: Any, new: Mapping[int, Any]) -> Any:
    """Return ``value`` with some objects replaced, by id in ``new``.

    Containers, closures and defaults of functions are searched. Values without such objects are returned unchanged, and
    cells without such objects stay shared.
    """
    return _Rebinding(new).of(value)


class _Rebinding:
    def __init__(self, new: Mapping[int, Any]) -> None:
        self._new = dict(new)
        self._met: dict[int, Any] = {}
        """Functions and containers that were met: what takes their place; themselves while they are looked into."""

    def of(self, value: Any) -> Any:
        if id(value) in self._new:
            return self._new[id(value)]
        if id(value) not in self._met:
            self._met[id(value)] = value
            self._met[id(value)] = self._inside(value)
        return self._met[id(value)]

    def _inside(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            function, owner = self.of(value.__func__), self.of(value.__self__)
            changed = function is not value.__func__ or owner is not value.__self__
            return types.MethodType(function, owner) if changed else value
        if type(value) is functools.partial:
            parts = value.func, value.args, value.keywords
            function, args, named = map(self.of, parts)
            changed = any(a is not b for a, b in zip(parts, (function, args, named)))
            return functools.partial(function, *args, **named) if changed else value
        if type(value) in (list, tuple) and len(value) <= _LONG:
            copies = self._all(value)
            return value if copies is None else type(value)(copies)
        if type(value) in (dict, OrderedDict) and len(value) <= _LONG:
            copies = self._all(value.values())
            return value if copies is None else type(value)(zip(value, copies))
        return value

    def _all(self, values: Iterable[Any]) -> list[Any] | None:
        """The values, each replaced if it holds a part; None if all stay."""
        old = list(values)
        new = [self.of(part) for part in old]
        return new if any(a is not b for a, b in zip(old, new)) else None

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        copied_cells = [self._cell(cell) for cell in cells]
        defaults, named = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        unchanged = defaults is function.__defaults__ and named is function.__kwdefaults__
        if unchanged and all(a is b for a, b in zip(cells, copied_cells)):
            return function
        code, name = function.__code__, function.__name__
        copied = types.FunctionType(code, function.__globals__, name, defaults, tuple(copied_cells) if cells else None)
        copied.__kwdefaults__ = named
        copied.__dict__.update(function.__dict__)
        return copied

    def _cell(self, cell: types.CellType) -> types.CellType:
        try:
            old = cell.cell_contents
        except ValueError:  # a variable that is not set yet
            return cell
        new = self.of(old)
        return cell if new is old else types.CellType(new)


def copy_tensor_hooks(old: torch.Tensor, new: torch.Tensor, memo: Mapping[int, Any]) -> None:
    """Give a copy of a parameter the hooks of the original; ``memo``: id of each part -> copy."""
    for name in TENSOR_HOOKS:
        hooks = getattr(old, name, None)
        if hooks:
            setattr(new, name, OrderedDict((key, rebound(hook, memo)) for key, hook in hooks.items()))


def rebind_hooks(owner: Any, memo: Mapping[int, Any]) -> None:
    """Let the hooks of a copied module or optimizer hold copies too."""
    for key, value in vars(owner).items():
        if "hook" in key and isinstance(value, dict):
            for name, hook in value.items():
                value[name] = rebound(hook, memo)
