"""Sequences of tensors by PyTorch: Python lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gopt.operators.torch_call import NodeSettings, numbers


def inserted(t: Any, a: NodeSettings, items: Sequence[Any], item: Any, at: Any = None) -> list[Any]:
    index = len(items) if at is None else int(numbers(at)[0])
    index += len(items) if index < 0 else 0
    return [*items[:index], item, *items[index:]]


def erased(t: Any, a: NodeSettings, items: Sequence[Any], at: Any = None) -> list[Any]:
    index = (-1 if at is None else int(numbers(at)[0])) % len(items)
    return [*items[:index], *items[index + 1 :]]


def parts(t: Any, a: NodeSettings, x: Any, sizes: Any = None) -> list[Any]:
    axis = a.get("axis", 0)
    if sizes is None:
        pieces = x.split(1, axis)
        return list(pieces) if a.get("keepdims", 1) else [piece.squeeze(axis) for piece in pieces]
    lengths = numbers(sizes)
    scalar = not isinstance(sizes, (list, tuple)) and not getattr(sizes, "ndim", 0)
    return list(x.split(int(lengths[0]) if scalar else [int(size) for size in lengths], axis))


def joined(t: Any, a: NodeSettings, items: Sequence[Any]) -> Any:
    return (t.stack if a.get("new_axis", 0) else t.cat)(list(items), a["axis"])
