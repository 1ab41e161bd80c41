"""Keys of values in a trace: two values with one key are the same expression of the same inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from gopt.runtime.pytorch.tensors import flat_bytes

_ATEN = torch.ops.aten
_COPIES = {
    _ATEN.clone.default: 0, _ATEN.detach.default: 0, _ATEN.alias.default: 0, _ATEN.lift_fresh_copy.default: 0,
    _ATEN.expand.default: 0, _ATEN.view.default: 0, _ATEN.copy.default: 1,
}  # fmt: skip
"""Operator -> position of the operand that a result of its shape and type is, where nothing changes in place."""


def copied_from(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node whose values a node has, in the same shape and type."""
    position = _COPIES.get(node.target)
    source = None if position is None else node.args[position]
    return source if isinstance(source, torch.fx.Node) and _form(source) == _form(node) else None


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
        if (source := copied_from(node)) is not None:
            return self._keys[source]
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


def _form(node: torch.fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else node


def _bytes(value: torch.Tensor) -> bytes:
    with _disable_current_modes():  # a trace would go on with nodes that read the constant
        return flat_bytes(value).tobytes()
