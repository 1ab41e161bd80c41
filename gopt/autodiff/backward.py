"""A model with the derivatives of a scalar, as a graph in the form of frameworks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gopt.autodiff.differentiate import Differentiated, differentiate
from gopt.autodiff.repairs import repair_transposed_convolutions
from gopt.autodiff.seed_rules import remove_seed_axis
from gopt.autodiff.shapes import settle_shapes
from gopt.autodiff.simplify import rename, simplify
from gopt.errors import UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.load import graph_of
from gopt.ir.model_file import refill
from gopt.text.sanitize import show

_INSIDE = 4096
"""Bytes up to which a constant is shown to onnx-ad."""


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A Gradient operator. ``scalar``: the differentiated value; ``results``: input -> derivative."""

    scalar: str
    results: dict[str, str]


def tidy(graph: Graph, result: Differentiated, forward: Collection[str]) -> None:
    """Bring a graph with a backward of onnx-ad into shape, in place. ``forward``: the values of the forward."""
    settle_shapes(graph)
    repair_transposed_convolutions(graph, set(forward))
    remove_seed_axis(graph, result.seeds, set(result.gradients.values()))
    other_name = simplify(graph)
    rename(graph, {other_name.get(value, value): value for value in result.gradients.values()})


def expand_gradient(part: ModelProto, call: GradientCall, states: Collection[str]) -> list[NodeProto]:
    """The nodes of ``part``, and of the derivatives a Gradient operator asks for, simplified.

    ``states``: stored values that are no constants, because the step replaces them. Outputs of ``part`` keep their
    names; new values are named after the first derivative. Raises UnsupportedError for an operator without a
    derivative, and for a value without influence on ``call.scalar``.
    """
    fed = {value.name for value in (*part.graph.input, *part.graph.initializer)}
    _refuse_unread(call, [name for name in call.results if name not in fed])
    model = deepcopy(part)
    _uncover(model, {*call.results, *states})
    backward = differentiate(model, call.scalar, list(call.results))
    _refuse_unread(call, backward.unread)
    types = {value.name: value.type for value in backward.model.graph.input}
    for name, result in call.results.items():
        backward.model.graph.node.append(helper.make_node("Identity", [backward.gradients[name]], [result]))
        output = backward.model.graph.output.add()
        output.name = result
        output.type.CopyFrom(types[name])
    graph = graph_of(backward.model)
    tidy(graph, backward, {name for node in part.graph.node for name in node.output})
    return _named_apart(graph, part, call)


def _refuse_unread(call: GradientCall, names: Sequence[str]) -> None:
    if names:
        raise UnsupportedError(
            f"Gradient differentiates {show(call.scalar)} by {show(names[0])}, on which it does not depend",
            "leave it out of xs",
        )


def _uncover(model: ModelProto, changing: Collection[str]) -> None:
    """Make changing or large stored values inputs: onnx-ad computes with constants."""
    graph, fed = model.graph, {value.name for value in model.graph.input}
    tensors = []
    for tensor in graph.initializer:
        large = tensor.data_location == TensorProto.EXTERNAL or tensor.ByteSize() > _INSIDE
        if tensor.name not in changing and not large:
            tensors.append(tensor)
        elif tensor.name not in fed:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    fed_and_kept = {stored.name for stored in tensors}
    inputs = [value for value in graph.input if value.name not in fed_and_kept]
    refill(graph.initializer, tensors)
    refill(graph.input, inputs)


def _named_apart(graph: Graph, part: ModelProto, call: GradientCall) -> list[NodeProto]:
    """Return the nodes with constants, new values under names unused in the model."""
    stored = {value.name for value in (*part.graph.input, *part.graph.initializer)}
    stored_or_made = stored | {value.name for value in part.graph.output}
    stored_or_made |= {name for node in part.graph.node for name in node.output} | set(call.results.values()) | {""}
    prefix = next(iter(call.results.values()))

    def named(name: str) -> str:
        return name if name in stored_or_made else f"{prefix}.{name}"

    nodes = [
        helper.make_node("Constant", [], [named(name)], value=numpy_helper.from_array(tensor.numpy()))
        for name, tensor in graph.initializers.items()
        if name not in stored
    ]
    for node in graph.nodes:
        proto = node.to_proto()
        proto.input[:] = map(named, node.inputs)
        proto.output[:] = map(named, node.outputs)
        nodes.append(proto)
    return nodes
