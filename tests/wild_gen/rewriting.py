"""What edits of models share: nodes replaced, parts of a step found by data flow, types."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, shape_inference
from steps_gen.graphs import reads

LOSS = "loss"
FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE)
"""Types of parameters."""


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def forward(model: ModelProto) -> list[NodeProto]:
    """The nodes that the loss depends on, in order."""
    wanted, found = {LOSS}, []
    for node in reversed(model.graph.node):
        if wanted.intersection(node.output):
            found.append(node)
            wanted |= reads(node)
    return found[::-1]


def stored(model: ModelProto) -> dict[str, TensorProto]:
    return {each.name: each for each in model.graph.initializer}


def parameters(model: ModelProto) -> list[str]:
    """Inputs of floats with a value that the forward reads."""
    graph, held = model.graph, stored(model)
    used = {name for node in forward(model) for name in reads(node)}
    return [
        each.name for each in graph.input
        if each.name in held and each.name in used and each.type.tensor_type.elem_type in FLOATS
        and each.type.tensor_type.shape.dim
    ]  # fmt: skip


def infos(model: ModelProto) -> dict[str, ValueInfoProto]:
    """Every value with its type."""
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    found = {each.name: each for each in (*graph.input, *graph.output, *graph.value_info)}
    for each in graph.initializer:
        found.setdefault(each.name, helper.make_tensor_value_info(each.name, each.data_type, list(each.dims)))
    return found


def batch(model: ModelProto) -> str:
    """The first input of floats without a value that has dimensions."""
    held = stored(model)
    for each in model.graph.input:
        if each.name not in held and each.type.tensor_type.shape.dim:
            return each.name
    raise LookupError("no batch")


def store(model: ModelProto, name: str, value: object, dtype: object = np.float32) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, dtype), name))
    return name


def rewrite(model: ModelProto, chosen: Iterable[str], change: Callable[[NodeProto], list[NodeProto]]) -> None:
    """Put what ``change`` returns in the place of the nodes that are named."""
    names = set(chosen)
    replace_nodes(
        model.graph, [new for node in model.graph.node for new in (change(node) if node.name in names else [node])]
    )


def copy_of(node: NodeProto) -> NodeProto:
    return NodeProto.FromString(node.SerializeToString())


def own_domain(model: ModelProto, domain: str = "own", version: int = 1) -> None:
    if all(each.domain != domain for each in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, version))


def opset(model: ModelProto) -> int:
    return next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
