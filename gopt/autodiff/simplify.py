"""Simplifies a graph without changing its arithmetic, in a sweep over the nodes.

Constants are folded; copies, layout operators without effect and equal nodes are merged; unread results are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from gopt.autodiff.no_ops import aliased, as_reshape
from gopt.autodiff.values import Values
from gopt.ir.constant_folding import measured
from gopt.ir.graph import Graph, Node
from gopt.operators.kinds import RANDOM, SIZES

FOLDED = 1024
"""Largest constant, in bytes, that folding makes."""


def simplify(graph: Graph) -> dict[str, str]:
    """Simplify a graph in place; returns the values that are no more, each with the equal one in its place.

    Inputs and outputs stay. Most rules apply to values of known shapes alone.
    """
    simplifier = _Simplifier(graph)
    simplifier.run()
    return simplifier.other_name


def rename(graph: Graph, names: Mapping[str, str]) -> None:
    """Rename results of nodes where the new name is free; outputs keep their names."""
    defined = {*graph.inputs, *graph.initializers, *(name for node in graph.nodes for name in node.outputs)}
    fixed = {
        *graph.inputs,
        *graph.initializers,
        *graph.outputs,
        *(capture for node in graph.nodes for capture in node.captures),
    }
    table = {old: new for old, new in names.items() if old in defined and old not in fixed and new not in defined}
    for node in graph.nodes:
        node.inputs = [table.get(name, name) for name in node.inputs]
        node.outputs = [table.get(name, name) for name in node.outputs]
    graph.types.update((new, graph.types[old]) for old, new in table.items() if old in graph.types)


class _Simplifier:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values = Values(graph)
        self.kept = {*graph.outputs, *(name for node in graph.nodes for name in node.captures)}
        """Names that stay: outputs, and what bodies of control flow read."""
        self.other_name: dict[str, str] = {}
        self.known: dict[object, Node] = {}

    def run(self) -> None:
        nodes = []
        for node in self.graph.nodes:
            node.inputs = [self.other_name.get(name, name) for name in node.inputs]
            if self._folded(node) or self._merged(node):
                continue
            node = as_reshape(node, self.values)
            self.values.produce(node)
            nodes.append(node)
        self.graph.nodes = nodes
        drop_unread(self.graph)

    def _merged(self, node: Node) -> bool:
        """Return whether a node is a copy of a value or of another node; readers then read the original."""
        if len(node.outputs) == 1 and node.outputs[0] not in self.kept:
            alias = aliased(node, self.values)
            if alias is not None:
                self.other_name[node.outputs[0]] = alias
                return True
        if node.captures or node.is_in(RANDOM) or self.kept & set(node.outputs):
            return False
        key = (node.op_type, node.domain, tuple(node.inputs), len(node.outputs), _attributes(node))
        twin = self.known.setdefault(key, node)
        if twin is node:
            return False
        self.other_name.update(zip(node.outputs, twin.outputs))
        return True

    def _folded(self, node: Node) -> bool:
        """Return whether a node's only result becomes a constant."""
        if len(node.outputs) != 1 or node.captures or node.is_in(RANDOM) or node.domain not in ("", "ai.onnx"):
            return False
        name = node.outputs[0]
        if name in self.kept:
            return False
        value = constant_result(node, self.values)
        if value is None:
            return False
        self.other_name[name] = self.values.constant(value, name)
        return True


def constant_result(node: Node, values: Values) -> np.ndarray | None:
    """Return the only result of a node if constant and of at most FOLDED bytes, else None."""
    graph = values.graph
    kind = graph.type_of(node.inputs[0]) if node.inputs and node.inputs[0] else None
    if node.is_in(SIZES) and kind is not None and kind.static:
        return measured(node, kind.dims)
    result = graph.type_of(node.outputs[0])
    stored = not node.reads
    if not stored and result.static and result.nbytes > FOLDED:
        return None
    operands = {name: values.array(name) for name in node.inputs if name}
    arrays = {name: array for name, array in operands.items() if array is not None}
    if len(arrays) < len(operands):
        return None
    folded = _evaluated(node, arrays, graph)
    return folded if folded is not None and (stored or folded.nbytes <= FOLDED) else None


def _evaluated(node: Node, arrays: dict[str, np.ndarray], graph: Graph) -> np.ndarray | None:
    """Return the result of an operator on constants; None if onnx's evaluator fails."""
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    ]
    body = onnx.helper.make_graph(
        [node.to_proto()], "folded", inputs, [onnx.helper.make_empty_tensor_value_info(node.outputs[0])]
    )
    try:
        model = onnx.helper.make_model(body, opset_imports=graph.header.opset_import)
        with np.errstate(all="ignore"):
            (output,) = ReferenceEvaluator(model).run(None, arrays)
        return np.asarray(output)
    except MemoryError:
        raise
    except Exception:  # it raises whatever NumPy does
        return None


def _attributes(node: Node) -> tuple[bytes, ...]:
    return tuple(sorted(attribute.SerializeToString(deterministic=True) for attribute in node.to_proto().attribute))


def drop_unread(graph: Graph) -> None:
    """Drop unread nodes and constants; inputs stay."""
    read = set(graph.outputs)
    nodes = []
    for node in reversed(graph.nodes):
        if not read.isdisjoint(node.outputs):
            nodes.append(node)
            read.update(node.reads)
    graph.nodes = nodes[::-1]
    _keep_only(graph, read)


def _keep_only(graph: Graph, read: Iterable[str]) -> None:
    wanted = {*read, *graph.inputs}
    for name in [name for name in graph.initializers if name not in wanted]:
        del graph.initializers[name]
