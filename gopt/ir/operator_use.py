"""A graph as the rules see it: nodes with logical types, and the constants that they read."""

from __future__ import annotations

import numpy as np

from gopt.ir.constant_folding import Constants
from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.operators.dims.link import OperatorUse


def use_of(node: Node, graph: Graph, constants: Constants) -> OperatorUse:
    """Return a node with its types, which are logical until the graph is made local."""

    def typed(names: list[str]) -> tuple[TensorType | None, ...]:
        return tuple(graph.type_of(name) if name else None for name in names)

    def constant(index: int) -> np.ndarray | None:
        return constants.value(node.inputs[index]) if index < len(node.inputs) and node.inputs[index] else None

    return OperatorUse(
        node.op_type, node.attributes, typed(node.inputs), typed(node.outputs), constant, constants.opset
    )
