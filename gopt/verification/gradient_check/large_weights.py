"""Large weights read by products alone stay float32 in a graph of float64, and so do their gradients.

A move of such a weight is a separate operand, for float32 could not tell the moved weight from the old one: x (w + s d)
becomes x w + s (x d)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import order_of
from gopt.ir.types import TensorType
from gopt.operators.kinds import MATRIX_PRODUCTS
from gopt.runtime.large_products import LARGE
from gopt.verification.reference_graphs import subgraph


def along(name: str) -> str:
    """The input with the direction of a weight's move."""
    return f"{name}.gopt.along"


def length(name: str) -> str:
    """The input with the length of a weight's move."""
    return f"{name}.gopt.length"


def with_large_weights(
    wide: Graph, before: Graph, gradients: Mapping[str, str], losses: Sequence[str]
) -> tuple[Graph, frozenset[str]]:
    """``wide``, the float64 form of ``before``, with large weights in float32, and their names.

    ``gradients``: of parameters. Only the losses read moves.
    """
    readers: dict[str, list[Node]] = {}
    for node in wide.nodes:
        for name in dict.fromkeys(node.reads):
            readers.setdefault(name, []).append(node)
    makers = {name: node for node in wide.nodes for name in node.outputs}
    large = {
        name: gradient
        for name, gradient in gradients.items()
        if _is_large(name, before) and all(_multiplies(node, name, gradients, before) for node in readers.get(name, ()))
        and _is_product(gradient, makers, readers)
    }  # fmt: skip
    if not large:
        return wide, frozenset()
    forward = {node.first_output for node in subgraph(wide, wide.nodes, losses, ()).nodes}
    result = replace(wide, nodes=[], inputs=dict(wide.inputs), outputs=dict(wide.outputs), types=dict(wide.types))
    for name, gradient in large.items():
        result.types[name] = result.inputs[name] = result.types[along(name)] = result.inputs[along(name)] = (
            before.types[name]
        )
        result.types[length(name)] = result.inputs[length(name)] = TensorType("float64", ())
        result.types[gradient] = before.types[gradient]
        if gradient in result.outputs:
            result.outputs[gradient] = before.types[gradient]
    dropped = set(large.values())
    for gradient in large.values():
        maker = makers[gradient]
        if order_of(maker, 2):
            product = makers[maker.inputs[0]]
            factor_a, factor_b = product.inputs
            dropped.add(product.first_output)
            makers[gradient] = Node("Gemm", [factor_b, factor_a], [gradient], attributes={"transA": 1, "transB": 1})
    for node in wide.nodes:
        if node.first_output in dropped:
            continue
        read = [name for name in node.inputs if name in large] if node.first_output in forward else []
        result.nodes += _moved(result, node, read[0]) if read else [node]
    # Last, where the backward has let go of what it needed: their operands are small.
    result.nodes += [makers[gradient] for gradient in dict.fromkeys(large.values())]
    return result, frozenset(large)


def _is_large(name: str, graph: Graph) -> bool:
    type = graph.types.get(name)
    return name in graph.inputs and type is not None and type.dtype == "float32" and (
        type.static and len(type.dims) == 2 and type.elements >= LARGE
    )  # fmt: skip


def _multiplies(node: Node, name: str, parameters: Collection[str], graph: Graph) -> bool:
    """Return whether a node is the product of a matrix that is no parameter and the weight, read once."""
    if not node.is_in(MATRIX_PRODUCTS) or node.captures or name in node.inputs[2:]:
        return False
    if sum(name in parameters for name in node.inputs[:2]) != 1:
        return False
    shapes = [graph.types[name].shape if name in graph.types else None for name in node.inputs[:2]]
    return all(shape is not None and len(shape) == 2 for shape in shapes)


def _is_product(gradient: str, makers: Mapping[str, Node], readers: Mapping[str, list[Node]]) -> bool:
    """Return whether an unread gradient is a product of two matrices, or a transposed product."""
    maker = makers.get(gradient)
    if maker is None or gradient in readers:
        return False
    if order_of(maker, 2) == (1, 0):
        product = makers.get(maker.inputs[0])
        return product is not None and product.is_a("MatMul") and len(readers[maker.inputs[0]]) == 1
    return maker.is_in(MATRIX_PRODUCTS) and len(maker.inputs) == 2


def _moved(graph: Graph, node: Node, name: str) -> list[Node]:
    """The product with the unmoved weight, and the product with the added move."""
    result = node.first_output
    moving, part, share = (f"{result}.gopt.{word}" for word in ("own", "part", "share"))
    graph.types |= dict.fromkeys((moving, part, share), graph.types[result])
    inputs = [along(name) if operand == name else operand for operand in node.inputs[:2]]
    node.outputs = [moving]
    return [
        node,
        Node(node.op_type, inputs, [part], attributes=dict(node.attributes)),
        Node("Mul", [part, length(name)], [share]),
        Node("Add", [moving, share], [result]),
    ]
