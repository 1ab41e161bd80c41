"""The part of a step needed by some values, and small pieces, evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from gopt.ir.constant_folding import Constants, as_constant
from gopt.ir.graph import Graph, Node
from gopt.ir.graph_index import GraphIndex, ancestors, walk
from gopt.ir.type_proto import value_info
from gopt.ir.types import TensorType, numpy_dtype
from gopt.operators.kinds import SIZES

OPEN = 3
"""The size of an open dimension, where a piece is evaluated."""


@dataclass(slots=True)
class ForwardSubgraph:
    """All nodes (by id) and values needed by the outputs of a forward. ``fed``: values that depend on more than the
    size of an input that is no state, or of a random node."""

    index: GraphIndex
    nodes: set[int]
    values: set[str]
    fed: set[str]

    @classmethod
    def of(cls, graph: Graph, outputs: Iterable[str], sources: Iterable[str]) -> ForwardSubgraph:
        """The subgraph of ``outputs``; ``sources``: inputs and random values that change from call to call."""
        index = GraphIndex(graph)
        nodes, values = ancestors(index, outputs)
        fed = walk(sources, lambda name: index.results(name, lambda node: not node.is_in(SIZES)))
        return cls(index, nodes, values, set(fed))

    @property
    def graph(self) -> Graph:
        return self.index.graph

    @property
    def constants(self) -> Constants:
        return self.index.constants

    def readers(self, name: str) -> list[Node]:
        """Nodes of the subgraph that read a value."""
        return [node for node in self.index.users.get(name, ()) if id(node) in self.nodes]


def evaluate(subgraph: ForwardSubgraph, target: str, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The value ``target`` from ``values``; other inputs on the way are 3 (integers) or 0.1, open dimensions 3.

    Raises as the reference evaluator for an unknown operator."""
    from onnx.reference import ReferenceEvaluator

    graph, index, feeds = subgraph.graph, subgraph.index, dict(values)
    sized = {name for node in graph.nodes if node.is_in(SIZES) for name in node.inputs}
    ends = values.keys() | sized
    needed = set(walk([target], lambda name: () if name in ends else index.operands(name))) - values.keys()
    for name in needed & (sized | (needed - index.producers.keys())):
        constant = index.constants.value(name)
        feeds[name] = _stand_in(graph.type_of(name)) if constant is None else constant
    nodes = [node for node in graph.nodes if not (needed - feeds.keys()).isdisjoint(node.outputs)]
    computed = {name for node in nodes for name in node.outputs}
    body = onnx.helper.make_graph(
        [as_constant(name, value) for name, value in feeds.items() if name not in computed]
        + [node.to_proto() for node in nodes],
        "piece", [], [value_info(target, TensorType(graph.type_of(target).dtype, None))],
    )  # fmt: skip
    model = onnx.helper.make_model(body, opset_imports=list(graph.header.opset_import))
    (array,) = ReferenceEvaluator(model).run([target], {})
    return np.asarray(array)


def _stand_in(type: TensorType) -> np.ndarray:
    dtype = numpy_dtype(type.dtype)
    dims = [dim if isinstance(dim, int) else OPEN for dim in type.shape or ()]
    return np.full(dims, 3 if np.issubdtype(dtype, np.integer) else 0.1, dtype)
