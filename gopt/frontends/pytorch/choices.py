"""Choices between the results of two paths, moved to where the paths differ: ``where(c, f(a, x), f(a, y))`` is
``f(a, where(c, x, y))``, which computes ``f`` once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse

from gopt.frontends.pytorch.node_keys import NodeKeys, copied_from

_WHERE = torch.ops.aten.where.self
_DEEP, _MOST = 200, 200_000
"""Operators below each other, and pairs of operators, that are looked at."""
_Key = tuple[Any, Any, Any]


def with_choices_below(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The graph with choices by conditions of no dimension as far below as both sides apply equal operators."""
    _merge_constants(module)
    for node in list(module.graph.nodes):
        if (source := copied_from(node)) is not None:
            node.replace_all_uses_with(source, lambda user: user.op != "output")
    graph = fx_graph_cse(module.graph)
    choices = _Choices(graph)
    for node in list(graph.nodes):
        if node.target is _WHERE and _is_scalar(node.args[0]):
            condition, then, orelse = node.args
            below = choices.between(condition, then, orelse, node)
            if below is not node:
                node.replace_all_uses_with(below)
    graph.eliminate_dead_code()
    return torch.fx.GraphModule(module, fx_graph_cse(graph))


def _merge_constants(module: torch.fx.GraphModule) -> None:
    """Let equal constants be a single node."""
    keys = NodeKeys(module)
    nodes_by_key: dict[int, torch.fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and nodes_by_key.setdefault(keys.of(node), node) is not node:
            node.replace_all_uses_with(nodes_by_key[keys.of(node)])


class _Choices:
    """``_elements``: condition and sides -> elements that the cheapest choice chooses; ``_nodes``: -> its node."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._elements: dict[_Key, int] = {}
        self._nodes: dict[_Key, torch.fx.Node] = {}

    def between(self, condition: Any, then: Any, orelse: Any, before: torch.fx.Node) -> Any:
        """The node of a choice, made in front of ``before`` unless made before."""
        key = condition, _side(condition, then, 1), _side(condition, orelse, 2)
        if key[1] is key[2]:
            return key[1]
        if key not in self._nodes:
            below = self._cost(key) < _elements(key[1])
            target, kwargs = (key[1].target, dict(key[1].kwargs)) if below else (_WHERE, {})
            args = tuple(self._operands(key, before)) if below else key
            with self._graph.inserting_before(before):
                self._nodes[key] = self._graph.call_function(target, args, kwargs)
            self._nodes[key].meta = dict(key[1].meta)
        return self._nodes[key]

    def _operands(self, key: _Key, before: torch.fx.Node) -> Iterator[Any]:
        condition, then, orelse = key
        for a, b in zip(then.args, orelse.args):
            if isinstance(a, torch.fx.Node) or isinstance(b, torch.fx.Node):
                yield self.between(condition, self._node(a, b, before), self._node(b, a, before), before)
            else:
                yield a

    def _node(self, value: Any, like: Any, before: torch.fx.Node) -> torch.fx.Node:
        """The value; for a number a tensor of the type of the node ``like``."""
        if isinstance(value, torch.fx.Node):
            return value
        with self._graph.inserting_before(before):
            node = self._graph.call_function(
                torch.ops.aten.scalar_tensor.default, (value,), {"dtype": like.meta["val"].dtype}
            )
        node.meta = dict(like.meta)
        return node

    def _cost(self, key: _Key, depth: int = 0) -> int:
        """The elements that the cheapest choice between two sides chooses: at the sides, or at their operands."""
        condition, then, orelse = key
        if then is orelse:
            return 0
        if key not in self._elements:
            self._elements[key] = elements = _elements(then)
            if depth < _DEEP and len(self._elements) < _MOST and _equal_operators(then, orelse):
                pairs = list(zip(then.args, orelse.args))
                nodes = [(a, b) for a, b in pairs if isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node)]
                keys = [(condition, _side(condition, a, 1), _side(condition, b, 2)) for a, b in nodes]
                numbers = sum(isinstance(a, torch.fx.Node) != isinstance(b, torch.fx.Node) for a, b in pairs)
                self._elements[key] = min(elements, numbers + sum(self._cost(pair, depth + 1) for pair in keys))
        return self._elements[key]


def _equal_operators(then: torch.fx.Node, orelse: torch.fx.Node) -> bool:
    """Return whether two nodes are of an operator, with operands to choose between."""
    alike = then.op == orelse.op == "call_function" and then.target == orelse.target and then.target is not _WHERE
    alike = alike and len(then.args) == len(orelse.args) and then.kwargs == orelse.kwargs
    return alike and all(a is b or _alike(a, b) for a, b in zip(then.args, orelse.args))


def _elements(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else _MOST


def _side(condition: Any, value: Any, side: int) -> Any:
    """The value that choices by the same condition give on a side."""
    while value.target is _WHERE and value.args[0] is condition:
        value = value.args[side]
    return value


def _alike(then: Any, orelse: Any) -> bool:
    """Return whether two operands may be chosen between: tensors of equal shape and type, a number and a tensor that
    stands for one, or equal other values."""
    if isinstance(then, torch.fx.Node) and isinstance(orelse, torch.fx.Node):
        a, b = then.meta.get("val"), orelse.meta.get("val")
        tensors = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return tensors and a.shape == b.shape and a.dtype == b.dtype  # type: ignore[union-attr]
    if isinstance(then, torch.fx.Node) or isinstance(orelse, torch.fx.Node):
        node, number = (then, orelse) if isinstance(then, torch.fx.Node) else (orelse, then)
        value = node.meta.get("val")
        return (
            type(number) in (int, float)
            and isinstance(value, torch.Tensor)
            and value.dim() == 0
            and value.dtype.is_floating_point
        )
    plain = not isinstance(then, list | tuple) or not any(isinstance(part, torch.fx.Node) for part in (*then, *orelse))
    return plain and type(then) is type(orelse) and repr(then) == repr(orelse)


def _is_scalar(condition: Any) -> bool:
    value = condition.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 0
