"""Operators of a traced step with no ONNX form, found before the whole step is converted, which takes long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


class FormlessError(torch.onnx.OnnxExporterError):
    """The exporter's error for a step with an operator of no ONNX form; the text is the operator's name."""


def refuse_formless(
    graph: torch.fx.Graph, outputs: int, opset: int, export: Callable[[torch.fx.GraphModule, tuple[Any, ...]], object]
) -> None:
    """Raise FormlessError for the first operator refused by ``export`` alone: of all operators behind the first
    ``outputs`` outputs, torch's exporter lists no form for some, and may have a form all the same."""
    unknown = _unknown(opset)
    needed = set(graph.output_node().args[0][:outputs])  # type: ignore[index, arg-type]
    tried = set()
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        if node not in needed or not isinstance(node.target, torch._ops.OpOverload) or not unknown(node):
            continue
        values = [operand.meta.get("val") for operand in node.all_input_nodes]
        if node.target in tried or not all(isinstance(value, torch.Tensor) for value in values):
            continue
        tried.add(node.target)
        try:
            export(_alone(node), tuple(torch.zeros(value.shape, dtype=value.dtype) for value in values))
        except torch.onnx.OnnxExporterError as error:
            raise FormlessError(node.target.name().replace("::", ".")) from error


def _unknown(opset: int) -> Callable[[torch.fx.Node], bool]:
    """Return a test for nodes without a function in torch's exporter: false for all, where its insides are unlike."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from torch.onnx._internal.exporter import _dispatching, _registration

        registry = _registration.ONNXRegistry().from_torchlib(opset_version=opset)
        return lambda node: _dispatching.dispatch(node, registry)[0] is None
    return lambda node: False


def _alone(node: torch.fx.Node) -> torch.fx.GraphModule:
    """A graph of a single operator; the inputs are all tensors read by the operator."""
    graph = torch.fx.Graph()
    inputs = {operand: graph.placeholder(operand.name) for operand in node.all_input_nodes}
    graph.output(graph.node_copy(node, inputs.__getitem__))
    return torch.fx.GraphModule({}, graph)
