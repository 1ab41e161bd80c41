"""Calls of ``torch._foreach_...`` as calls tensor by tensor, with numbers that may be tensors."""

from __future__ import annotations

from typing import Any

import torch

PREFIX = "_foreach_"
_BOUNDS = {"maximum": "min", "clamp_min": "min", "minimum": "max", "clamp_max": "max"}
"""Name -> the bound of ``clamp`` that a number is."""


def is_foreach(function: Any) -> bool:
    """Return whether a function of torch works on lists of tensors."""
    return getattr(function, "__name__", "").startswith(PREFIX)


def tensor_by_tensor(function: Any, args: Any, kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)`` for each tensor; returns a list, or None for work in place."""
    name = function.__name__.removeprefix(PREFIX)
    operands = [*args, *kwargs.values()]
    count = next(len(members) for members in operands if isinstance(members, list | tuple))
    results = [
        _one(name, [_at(arg, index) for arg in args], {key: _at(arg, index) for key, arg in kwargs.items()})
        for index in range(count)
    ]
    return None if name.endswith("_") else results


def _at(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list | tuple) else value


def _one(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    plain = name.removesuffix("_")
    x, rest = args[0], args[1:]
    if plain in ("addcmul", "addcdiv"):
        values = [*rest[2:], *(kwargs[key] for key in ("value", "scalars") if key in kwargs)]
        return getattr(x, name)(*rest[:2], value=values[0] if values else 1)
    if plain in _BOUNDS:
        bound = next(iter((*rest, *kwargs.values())))
        if isinstance(bound, torch.Tensor):
            bounded = torch.maximum(x, bound) if _BOUNDS[plain] == "min" else torch.minimum(x, bound)
            return x.copy_(bounded) if name.endswith("_") else bounded
        return getattr(x, "clamp_" if name.endswith("_") else "clamp")(**{_BOUNDS[plain]: bound})
    if plain == "norm":
        return torch.linalg.vector_norm(x, *rest, **kwargs)
    if plain == "copy":
        return x.copy_(rest[0]) if name.endswith("_") else rest[0].to(x.dtype).clone()
    if plain == "pow" and not isinstance(x, torch.Tensor):
        return torch.pow(x, *rest)
    if "scalars" in kwargs:
        rest = [*rest, kwargs.pop("scalars")]
    return getattr(x, name)(*rest, **kwargs)
