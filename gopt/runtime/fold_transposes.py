"""Folds transposes into matrix products, which read transposed operands in place: no copy is made.

An exporter writes a gradient as a product with a transposed operand. The copy costs a pass over memory, and stays
allocated from the forward to the backward if the two are in different segments. ONNX Runtime's products read an operand
either way. Products may then block sums differently (seen where a side has one row, or the inner dimension has 300
elements), so the last bits may differ from a product with a copy: folding is part of every run, not of tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import swaps_last_axes
from gopt.ir.types import TensorType
from gopt.operators.kinds import MATRIX_PRODUCTS

FUSED = "com.microsoft"
"""Domain of the runtime's own MatMul with transposed operands; float32 alone has a kernel."""


def fold_transposes(graph: Graph) -> Graph:
    """Return the graph with float32 MatMul and Gemm on the operands of Transpose nodes of the last two axes.

    The Transpose nodes stay; partitioning leaves out unread nodes. Linear time."""
    swapped = {
        name: node.inputs[0] for node in graph.nodes for name in node.outputs if _swaps(node, graph.types.get(name))
    }
    if not swapped:
        return graph
    nodes = [_folded(node, swapped, graph.types) for node in graph.nodes]
    if all(new is old for new, old in zip(nodes, graph.nodes)):
        return graph
    header = type(graph.header)()
    header.CopyFrom(graph.header)
    if all(entry.domain != FUSED for entry in header.opset_import):
        header.opset_import.add(domain=FUSED, version=1)
    return replace(graph, nodes=nodes, header=header)


def _swaps(node: Node, type: TensorType | None) -> bool:
    if type is None or type.dtype != "float32" or type.shape is None:
        return False
    return swaps_last_axes(node, len(type.shape))


def _folded(node: Node, swapped: Mapping[str, str], types: Mapping[str, TensorType]) -> Node:
    if not node.is_in(MATRIX_PRODUCTS) or swapped.keys().isdisjoint(node.inputs[:2]):
        return node
    # A vector operand is a row or a column as the product needs it: nothing to transpose.
    if any((type := types.get(name)) is None or type.shape is None or len(type.shape) < 2 for name in node.inputs[:2]):
        return node
    if any(0 in (types[name].shape or ()) for name in node.inputs[:2]):
        return node  # over nothing, the runtime's product leaves all matrices but the first as it finds them
    attributes = dict(node.attributes)
    for index, key in enumerate(("transA", "transB")):
        attributes[key] = int(attributes.get(key, 0)) ^ (node.inputs[index] in swapped)
    inputs = [swapped.get(name, name) if index < 2 else name for index, name in enumerate(node.inputs)]
    fused = node.is_a("MatMul")
    return Node("FusedMatMul" if fused else "Gemm", inputs, node.outputs, domain=FUSED if fused else "",
                name=node.name, attributes=attributes, made_by=node.made_by, sharding=node.sharding)  # fmt: skip
