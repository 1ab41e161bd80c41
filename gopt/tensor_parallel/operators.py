"""A graph as the rules see it: nodes with logical types, and the constants that they read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gopt.ir import constant_folding as folding
from gopt.ir.graph import Graph, Node
from gopt.ir.opset import opset_of
from gopt.ir.types import TensorType
from gopt.sharding.links import Operator

LARGEST = 4096
"""Most elements of a constant that can describe an operator's dimensions: axes, shapes, indices."""


@dataclass(slots=True)
class Constants:
    """Small constants of a graph; each is read once."""

    graph: Graph
    opset: int = field(init=False)
    _folded: folding.Constants = field(init=False)
    _read: dict[str, np.ndarray | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.opset = opset_of(self.graph.header)
        self._folded = folding.Constants(self.graph, self.graph.producers())

    def get(self, name: str) -> np.ndarray | None:
        """Return the value of a small constant; None where it is large or no constant."""
        if name not in self._read:
            self._read[name] = self._value(name)
        return self._read[name]

    def _value(self, name: str) -> np.ndarray | None:
        tensor = self.graph.initializers.get(name)
        if tensor is not None:
            return tensor.numpy() if tensor.type.elements <= LARGEST else None
        value = self._folded.value(name)
        return value if value is not None and value.size <= LARGEST else None


def operator(node: Node, graph: Graph, constants: Constants) -> Operator:
    """Return a node with its types, which are logical until the graph is made local."""

    def typed(names: list[str]) -> tuple[TensorType | None, ...]:
        return tuple(graph.type_of(name) if name else None for name in names)

    def constant(place: int) -> np.ndarray | None:
        return constants.get(node.inputs[place]) if place < len(node.inputs) and node.inputs[place] else None

    return Operator(node.op_type, node.attributes, typed(node.inputs), typed(node.outputs), constant, constants.opset)
