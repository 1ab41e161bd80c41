"""The algorithm of a step: the part outside the inference graph.

The standard joins both graphs: a value of the inference graph is computed once, and each name is one value. Values
changed by BatchNorm and dropout in evaluation are therefore computed a second time, as in training, under other
names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnx import FunctionProto

from gopt.analysis.training import TrainingGraph
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.free_names import FreeNames
from gopt.ir.graph import COMM, Graph, Node, clone
from gopt.ir.nodes import nested
from gopt.ir.opaque.function_export import source_nodes
from gopt.ir.symbol_table import RESERVED
from gopt.offline.inference.forward import InferenceForward
from gopt.text.sanitize import show

IN_TRAINING = "training"
"""The end of the name of a value that is another one in evaluation."""


@dataclass(frozen=True, slots=True)
class StepDivision:
    """A step as an inference graph and the algorithm's nodes, in order.

    ``functions``: bodies of optimizers missing in the source. ``names``: a value of the step -> the name in the
    algorithm, where evaluation computes another value under the step's name."""

    inference: Graph
    nodes: Sequence[Node]
    functions: Sequence[FunctionProto]
    names: Mapping[str, str]
    free: FreeNames

    def name(self, value: str) -> str:
        """The name of a step's value in the joined graph."""
        return self.names.get(value, value)


def divide(training: TrainingGraph, forward: InferenceForward) -> StepDivision:
    """Divide a step at the forward. Nodes of optimizers are as in the file, not written out.

    Raises UnsupportedError for a collective, and for a body of control flow that reads a value with two names;
    OptionError for a loss with two names."""
    nodes, functions = source_nodes(training.graph)
    _refuse_collectives(training.graph.nodes)
    free = FreeNames(_names(training.graph, nodes) | _names(forward.graph, ()))
    inference = _with_own_names(forward.graph, free)
    computed = {name for node in inference.nodes for name in node.outputs if name}
    unchanged = computed - forward.changed
    remaining = [node for node in nodes if not unchanged.issuperset(filter(None, node.outputs))]
    again = dict.fromkeys(name for node in remaining for name in node.outputs if name in computed)
    twice = next((loss for loss in training.losses if loss in again), None)
    if twice is not None:
        raise OptionError(
            f"the loss {show(twice)} is another value in evaluation, where "
            f"{'running statistics replace batch statistics' if forward.running else 'dropout passes values on'}",
            "let --output name a value that the loss is computed from",
        )
    names = {name: free.take(f"{name}.{IN_TRAINING}") for name in again}
    labels = {node.name for node in inference.nodes}
    return StepDivision(inference, [_named(node, names, labels, free) for node in remaining], functions, names, free)


def _refuse_collectives(nodes: Iterable[Node]) -> None:
    for node in nodes:
        if node.domain == COMM:
            raise UnsupportedError(
                f"the step has the collective {node.op_type} {show(node.label)}: training_info describes one process",
                "write the step of one process, and let gopt shard add the collectives",
            )


def _names(graph: Graph, nodes: Iterable[Node]) -> set[str]:
    """Every name used by a graph or its nodes, inside bodies too, values and nodes alike."""
    names = {*graph.inputs, *graph.outputs, *graph.initializers, *graph.types}
    for node in (*graph.nodes, *nodes):
        names.update((node.name, *node.inputs, *node.outputs))
        if node.captures:
            names.update(name for proto in nested([node.to_proto()]) for name in (*proto.input, *proto.output))
    return names


def _with_own_names(graph: Graph, free: FreeNames) -> Graph:
    """The graph without gopt's private names: a reader would refuse these."""
    table = {
        name: free.take(name.removeprefix(RESERVED))
        for node in graph.nodes
        for name in node.outputs
        if name.startswith(RESERVED)
    } | {name: free.take(name.removeprefix(RESERVED)) for name in graph.initializers if name.startswith(RESERVED)}
    nodes = []
    for node in graph.nodes:
        if node.made_by:
            node = clone(node)
            node.made_by = ""
        if node.name.startswith(RESERVED):
            node = _relabelled(node, free.take(node.name.removeprefix(RESERVED)))
        nodes.append(_renamed(node, table))
    return replace(
        graph,
        nodes=nodes,
        outputs={table.get(name, name): type for name, type in graph.outputs.items()},
        initializers={table.get(name, name): tensor for name, tensor in graph.initializers.items()},
        types={table.get(name, name): type for name, type in graph.types.items()},
    )


def _named(node: Node, names: Mapping[str, str], labels: set[str], free: FreeNames) -> Node:
    """A node of the algorithm: with the algorithm's names of values, and a unique name."""
    if node.name and node.name in labels:
        node = _relabelled(node, free.take(f"{node.name}.{IN_TRAINING}"))
    return _renamed(node, names)


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    if names.keys().isdisjoint((*node.inputs, *node.outputs, *node.captures)):
        return node
    hidden = next((name for name in node.captures if name in names), None)
    if hidden is not None:
        raise UnsupportedError(
            f"a body of {node.op_type} {show(node.label)} reads {show(hidden)}, which is another value in evaluation",
            "let --output name a value before it",
        )
    copy = clone(node)
    copy.inputs = [names.get(name, name) for name in node.inputs]
    copy.outputs = [names.get(name, name) for name in node.outputs]
    return copy


def _relabelled(node: Node, name: str) -> Node:
    copy = clone(node)
    copy.name = name
    if (proto := copy.proto) is not None:
        proto.name = name
        copy.proto = proto
    return copy
