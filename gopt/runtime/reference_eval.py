"""Runs whole graphs at once by onnx's reference evaluator, with kernels for more types."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gopt.analysis.flops import flops_of
from gopt.errors import GoptError, RunError
from gopt.ir.graph import COMM, Graph
from gopt.ir.scopes import bodies
from gopt.runtime.fallback_kernels import operators
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.proto import build_model, is_embedded, stored
from gopt.runtime.session import Array, first_line

TURNS = 64
"""Turns that a loop is taken to make, for an estimate."""


def evaluate(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a graph once by onnx's reference evaluator: slow, but with kernels for every type, such as float64."""
    from onnx.reference import ReferenceEvaluator

    graph = inlined(graph)
    values = {name: np.asarray(array) for name, array in feeds.items()}
    small = []
    types = dict(graph.inputs)
    for name, tensor in graph.initializers.items():
        if name not in values and is_embedded(graph, name):
            small.append(stored(name, tensor))
        elif name not in values:
            types[name], values[name] = tensor.type, tensor.numpy()
    for name in graph.inputs:
        if name not in values:
            raise RunError(f"input {name!r} was not fed, and the file stores no value")
    model = build_model(graph.header, graph.nodes, types, graph.outputs, small)
    for named in (*model.opset_import, *model.graph.node):  # the evaluator knows one name of the standard's operators
        named.domain = "" if named.domain == "ai.onnx" else named.domain
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(model, new_ops=list(operators())).run(None, values)
    except GoptError:
        raise
    except Exception as error:  # it raises whatever NumPy does
        raise RunError(f"the reference evaluator failed: {first_line(error)}") from error
    return {name: np.asarray(result) for name, result in zip(graph.outputs, results, strict=True)}


def seconds(graph: Graph, per_node: float = 1e-4) -> float:
    """The approximate time of the reference evaluator; infinite for a graph that cannot run.

    ``per_node``: of this, the time of a node on next to nothing."""
    total = 0.0
    for node in graph.nodes:
        types = [graph.type_of(name) for name in (*node.reads, *node.outputs) if name]
        if node.domain == COMM or not all(type.static for type in types):
            return float("inf")
        proto = node.proto
        turns = 1 + TURNS * sum(len(body.node) for body in bodies(proto)) if proto is not None else 1
        total += turns * per_node + sum(type.elements for type in types) * 5e-9 + flops_of(graph, node) * 1e-10
    return total
