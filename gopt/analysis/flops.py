"""Floating-point operations of a graph: those of its products and convolutions, a multiplication and an addition each.
What is elementwise is not counted, as is usual."""

from __future__ import annotations

from math import prod

from gopt.ir.graph import Graph, Node


def flops(graph: Graph) -> int:
    """Operations of one run; a node whose sizes are not known counts nothing."""
    return sum(_of_node(graph, node) for node in graph.nodes)


def _of_node(graph: Graph, node: Node) -> int:
    rule = _RULES.get(node.op_type) if not node.domain else None
    if rule is None:
        return 0
    types = [graph.types.get(name) for name in (*node.inputs[:2], node.outputs[0])]
    if any(type is None or not type.static for type in types):
        return 0
    return 2 * rule(node, *(type.dims for type in types if type is not None))


def _product(node: Node, a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]) -> int:
    transposed = node.op_type == "Gemm" and node.attributes.get("transA", 0)
    return prod(out) * (a[0 if transposed else -1] if a else 1)


def _convolution(node: Node, x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...]) -> int:
    return prod(out) * prod(w[1:])


def _transposed(node: Node, x: tuple[int, ...], w: tuple[int, ...], out: tuple[int, ...]) -> int:
    return prod(x) * prod(w[1:])


def _einsum(node: Node, a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]) -> int:
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if len(terms) != 2 or "." in equation:
        return 0
    return prod(dict(zip("".join(terms), (*a, *b))).values())


_RULES = {
    "MatMul": _product, "Gemm": _product, "Conv": _convolution, "ConvTranspose": _transposed, "Einsum": _einsum,
}  # fmt: skip
