"""Tensors and numbers in nested dicts, lists and tuples, by keys from the outside in."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

Keys = tuple[Hashable, ...]
"""Keys of dicts and positions in lists and tuples, from the outside in."""
_KEYS = (str, int, float, tuple, type(None))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_value(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or is_number(value)


def leaves(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yield tensors and numbers with keys. A cyclic container ends in a RecursionError."""
    if is_value(value):
        yield keys, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, _KEYS):
                yield from leaves(inner, (*keys, key))
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from leaves(inner, (*keys, position))


def mapped(value: Any, change: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """A copy of containers with changed tensors and numbers; other objects are shared."""
    if is_value(value):
        return change(value)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, mapped(inner, change)) for key, inner in value.items())
    return type(value)(mapped(inner, change) for inner in value) if type(value) in (list, tuple) else value


def fresh(value: Any) -> Any:
    """A copy of a container, with copies of all dicts, lists and tuples inside; other objects are shared."""
    return copy.copy(mapped(value)) if isinstance(value, dict | list | tuple | set | deque) else value


def find(value: Any, keys: Keys) -> Any:
    """The value at the keys, or None."""
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def put(value: Any, keys: Keys, leaf: Any) -> Any:
    """The containers with another leaf: dicts and lists change in place, tuples are made anew."""
    if not keys:
        return leaf
    key: Any = keys[0]
    inner = put(value[key] if len(keys) > 1 else None, keys[1:], leaf)
    if isinstance(value, tuple):
        return (*value[:key], inner, *value[key + 1 :])
    value[key] = inner
    return value


def dotted(keys: Keys) -> str:
    return ".".join(map(str, keys))
