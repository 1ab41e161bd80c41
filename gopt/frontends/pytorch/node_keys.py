"""Keys of values in a trace: two values with one key are the same expression of the same inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_ATEN = torch.ops.aten
_COPIES = (_ATEN.clone.default, _ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh_copy.default)
"""Operators whose result is their first operand, where nothing is changed in place."""


class NodeKeys:
    """Numbers the nodes of a growing fx graph without effects; equal expressions get equal numbers."""

    def __init__(self, owner: Any) -> None:
        """``owner``: a tracer, or a module with a graph."""
        self._constants = getattr(owner, "root", owner)
        self._keys: dict[torch.fx.Node, int] = {}
        self._numbers: dict[Any, int] = {}
        self._last: torch.fx.Node = owner.graph._root

    def of(self, node: torch.fx.Node) -> int:
        """The key of a node of the graph."""
        while node not in self._keys:
            self._last = self._last.next
            if self._last.op == "root":
                raise KeyError(node)
            self._keys[self._last] = self._number(self._last)
        return self._keys[node]

    def _number(self, node: torch.fx.Node) -> int:
        if node.target in _COPIES:
            return self._keys[node.args[0]]  # type: ignore[index]
        if node.target is torch.ops.aten.copy.default and _form(node.args[0]) == _form(node.args[1]):
            return self._keys[node.args[1]]  # type: ignore[index]
        if node.op == "get_attr":
            value = getattr(self._constants, str(node.target), None)
            content: Any = node.target
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                content = value.dtype, tuple(value.shape), _bytes(value)
            entry: Any = "constant", content
        elif node.op == "placeholder":
            entry = "input", node.target
        else:
            entry = node.op, node.target, self._frozen(node.args), self._frozen(node.kwargs)
        return self._numbers.setdefault(entry, len(self._numbers))

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return "node", self._keys[value]
        if isinstance(value, dict):
            return tuple((key, self._frozen(inner)) for key, inner in value.items())
        if isinstance(value, list | tuple):
            return tuple(map(self._frozen, value))
        return type(value).__name__, repr(value)  # 1, 1.0 and True are equal in Python


def _form(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else node


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
