"""A graph as rules see it: nodes with logical types, and constant operands."""

from __future__ import annotations

import numpy as np

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.operators.dims.link import OperatorUse


def use_of(node: Node, graph: Graph, constants: Constants) -> OperatorUse:
    """Return a node with the types, logical until the graph is local."""

    def typed(names: list[str]) -> tuple[TensorType | None, ...]:
        return tuple(graph.type_of(name) if name else None for name in names)

    def constant(index: int) -> np.ndarray | None:
        return constants.value(node.inputs[index]) if index < len(node.inputs) and node.inputs[index] else None

    return OperatorUse(
        node.op_type, node.attributes, typed(node.inputs), typed(node.outputs), constant, constants.opset
    )
