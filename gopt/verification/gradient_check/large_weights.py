"""Large weights that products alone read stay float32 in a graph of float64, and so do their gradients.

A move of such a weight is an operand of its own, for float32 could not tell the moved one from it: x (w + s d) becomes
x w + s (x d).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.runtime.large_products import LARGE
from gopt.verification.reference_graphs import subgraph


def along(name: str) -> str:
    """The input that holds the direction in which a weight is moved."""
    return f"{name}.gopt.along"


def length(name: str) -> str:
    """The input that says how far."""
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
    made = replace(wide, nodes=[], inputs=dict(wide.inputs), outputs=dict(wide.outputs), types=dict(wide.types))
    for name, gradient in large.items():
        made.types[name] = made.inputs[name] = made.types[along(name)] = made.inputs[along(name)] = before.types[name]
        made.types[length(name)] = made.inputs[length(name)] = TensorType("float64", ())
        made.types[gradient] = before.types[gradient]
        if gradient in made.outputs:
            made.outputs[gradient] = before.types[gradient]
    dropped = set(large.values())
    for gradient in large.values():
        maker = makers[gradient]
        if maker.op_type == "Transpose":
            product = makers[maker.inputs[0]]
            first, second = product.inputs
            dropped.add(product.first_output)
            makers[gradient] = Node("Gemm", [second, first], [gradient], attributes={"transA": 1, "transB": 1})
    for node in wide.nodes:
        if node.first_output in dropped:
            continue
        read = [each for each in node.inputs if each in large] if node.first_output in forward else []
        made.nodes += _moved(made, node, read[0]) if read else [node]
    # Last, where the backward has let go of what it needed: their operands are small.
    made.nodes += [makers[gradient] for gradient in dict.fromkeys(large.values())]
    return made, frozenset(large)


def _is_large(name: str, graph: Graph) -> bool:
    type = graph.types.get(name)
    return name in graph.inputs and type is not None and type.dtype == "float32" and (
        type.static and len(type.dims) == 2 and type.elements >= LARGE
    )  # fmt: skip


def _multiplies(node: Node, name: str, parameters: Collection[str], graph: Graph) -> bool:
    """Return whether a node is the product of a matrix that is no parameter and the weight, which it reads once."""
    if not node.is_a("MatMul", "Gemm") or node.captures or name in node.inputs[2:]:
        return False
    if sum(each in parameters for each in node.inputs[:2]) != 1:
        return False
    shapes = [graph.types[each].shape if each in graph.types else None for each in node.inputs[:2]]
    return all(shape is not None and len(shape) == 2 for shape in shapes)


def _is_product(gradient: str, makers: Mapping[str, Node], readers: Mapping[str, list[Node]]) -> bool:
    """Return whether a gradient that nothing reads is a product of two matrices, or a transposed one."""
    maker = makers.get(gradient)
    if maker is None or gradient in readers:
        return False
    if maker.is_a("Transpose") and list(maker.attributes.get("perm", [1, 0])) == [1, 0]:
        product = makers.get(maker.inputs[0])
        return product is not None and product.is_a("MatMul") and len(readers[maker.inputs[0]]) == 1
    return maker.is_a("MatMul") or (maker.is_a("Gemm") and len(maker.inputs) == 2)


def _moved(graph: Graph, node: Node, name: str) -> list[Node]:
    """The product with the weight as it is, and that with its move added."""
    result = node.first_output
    own, part, share = (f"{result}.gopt.{word}" for word in ("own", "part", "share"))
    graph.types |= dict.fromkeys((own, part, share), graph.types[result])
    inputs = [along(name) if each == name else each for each in node.inputs[:2]]
    node.outputs = [own]
    return [
        node,
        Node(node.op_type, inputs, [part], attributes=dict(node.attributes)),
        Node("Mul", [part, length(name)], [share]),
        Node("Add", [own, share], [result]),
    ]
