"""Refuses steps with shapes depending on values: a trace has the example's shapes as constants."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from gopt.errors import UnsupportedError

aten = torch.ops.aten

EXPERTS = "experts of transformers: experts_implementation='batched_mm'"
"""The implementation of experts with fixed shapes."""


def refuse_shapes_of_values(
    graph: torch.fx.GraphModule, inputs: Sequence[str], constants: Container[str], lines: Mapping[str, str]
) -> None:
    """Raise UnsupportedError for an operator such as ``nonzero`` on values decided by the batch or states. ``inputs``:
    names of the graph's inputs; ``constants``: values no step changes. ``lines``: operator -> the calling line."""
    varying: set[torch.fx.Node] = set()
    names = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            if next(names) not in constants:
                varying.add(node)
        elif varying.intersection(node.all_input_nodes):
            varying.add(node)
            if varying.intersection(_deciding(node)):
                raise _refusal(node.target, lines)


def _deciding(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operands with values behind the shape of a result."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return []
    if node.target is aten.index.Tensor:
        return [index for index in node.args[1] if index is not None and _is_mask(index)]
    if node.target is aten.masked_select.default:
        return [node.args[1]]
    return node.all_input_nodes


def _is_mask(node: Any) -> bool:
    value = node.meta.get("val", node.meta.get("tensor_meta"))
    return value is None or value.dtype in (torch.bool, torch.uint8)


def _refusal(operator: Any, lines: Mapping[str, str]) -> UnsupportedError:
    where = lines.get(str(operator), "")
    masks = (aten.index.Tensor, aten.masked_select.default, aten.nonzero.default)
    hint = f"keep the shape, and weigh by the mask: (loss * mask).sum() / mask.sum(), or torch.where ({EXPERTS})"
    return UnsupportedError(
        f"the shape of a value depends on the batch or on states: {operator}{where and f', {where}'}",
        "the step would hold for the example's number of elements alone",
        hint if operator in masks else "write it with operators whose results have one shape",
    )
