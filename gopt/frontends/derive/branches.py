"""Takes the branch of an If with a constant condition, as exporters write for decisions by sizes: with fixed sizes the
condition is constant. Nodes of the branch, with weights, become ordinary parts of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from gopt.autodiff.operators import bodies, names_of
from gopt.ir.free_names import FreeNames
from gopt.ir.model_file import refill


def take_branches(model: ModelProto, conditions: Mapping[str, bool]) -> list[TensorProto] | None:
    """Replace each If of the graph with a condition in ``conditions`` by the nodes of its branch.

    Returns the constants of these branches, read by the graph from now on; None without such an If.
    """
    graph = model.graph
    if not any(_decided(node, conditions) for node in graph.node):
        return None
    inner = Counter(name for body in bodies(graph.node) for name in _made(body))
    free = FreeNames(names_of(model))
    nodes: list[NodeProto] = []
    constants: list[TensorProto] = []
    for node in graph.node:
        if not _decided(node, conditions):
            nodes.append(node)
            continue
        body = _branch(node, conditions[node.input[0]])
        names = {name: name if inner[name] == 1 else free.take(name) for name in _made(body)}
        outputs = {name for node in body.node for name in node.output}
        results = list(zip((value.name for value in body.output), node.output))
        names |= {name: result for name, result in results if name in outputs}
        nodes += _renamed(body.node, names)
        # A branch may hand on a constant, a value from outside, or one value twice.
        copies = [(names.get(name, name), result) for name, result in results]
        nodes += [helper.make_node("Identity", [name], [result]) for name, result in copies if name != result]
        for tensor in body.initializer:
            constants.append(TensorProto())
            constants[-1].CopyFrom(tensor)
            constants[-1].name = names[tensor.name]
    refill(graph.node, nodes)
    return constants


def _decided(node: NodeProto, conditions: Mapping[str, bool]) -> bool:
    return node.op_type == "If" and node.domain in ("", "ai.onnx") and node.input[0] in conditions


def _branch(node: NodeProto, condition: bool) -> GraphProto:
    wanted = "then_branch" if condition else "else_branch"
    body: GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == wanted)
    return body


def _made(body: GraphProto) -> Iterator[str]:
    """The names a body gives values, its own bodies excluded."""
    yield from (value.name for value in (*body.input, *body.initializer))
    yield from (name for node in body.node for name in node.output if name)


def _renamed(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> Iterator[NodeProto]:
    """Copies of nodes with renamed values, also in bodies."""
    for node in nodes:
        copy = deepcopy(node)
        _rename(copy, names)
        yield copy


def _rename(node: NodeProto, names: Mapping[str, str]) -> None:
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for body in bodies([node]):
        for inner in body.node:
            inner.input[:] = [names.get(name, name) for name in inner.input]
        for value in body.output:
            value.name = names.get(value.name, value.name)
