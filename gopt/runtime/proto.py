"""Converts nodes and types back into a small ONNX model, for sessions and shape inference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto

from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.scopes import bodies
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import value_info
from gopt.ir.types import TensorType

IR_VERSION = 10
"""Highest version of the file format that a segment has. The source's version says which onnx wrote it; runtimes refuse
files of versions that they do not know, even where nothing in them is new."""
EMBEDDED = 4096
"""Bytes up to which a constant stands inside a model; above, it is an input, so that its memory is shared."""


def build_model(
    header: ModelProto,
    nodes: Iterable[Node],
    inputs: Mapping[str, TensorType],
    outputs: Mapping[str, TensorType],
    constants: Iterable[TensorProto] = (),
) -> ModelProto:
    """A model around nodes. The model has no metadata of the header: these name the rank, and equal models must have
    equal bytes."""
    model = ModelProto(ir_version=min(header.ir_version, IR_VERSION))
    model.opset_import.extend(entry for entry in header.opset_import if entry.domain != COMM)
    model.functions.extend(header.functions)
    body = model.graph
    body.name = "segment"
    body.node.extend(node.to_proto() for node in nodes)
    body.input.extend(value_info(name, type) for name, type in inputs.items())
    body.output.extend(value_info(name, type) for name, type in outputs.items())
    body.initializer.extend(constants)
    return model


def is_constant(graph: Graph, name: str) -> bool:
    """Return whether a value is stored and is not an input."""
    return name in graph.initializers and name not in graph.inputs


def is_embedded(graph: Graph, name: str) -> bool:
    """Return whether a session's model stores a value."""
    return is_constant(graph, name) and is_small(graph.initializers[name])


def is_small(tensor: Tensor) -> bool:
    """Return whether a constant may be stored in a session's model. Strings always are: ONNX Runtime takes no strings
    by reference."""
    return tensor.type.dtype == "string" or tensor.nbytes <= EMBEDDED


def stored(name: str, tensor: Tensor) -> TensorProto:
    """A constant as a TensorProto of this name."""
    if tensor.proto is not None and not tensor.external:
        if tensor.proto.name == name:
            return tensor.proto
        proto = TensorProto()
        proto.CopyFrom(tensor.proto)
    else:
        # Not ascontiguousarray, which makes a scalar a list of one.
        proto = onnx.numpy_helper.from_array(np.array(tensor.numpy(), order="C"))
    proto.name = name
    return proto


def as_node(proto: NodeProto) -> Node:
    """A Node of a NodeProto, with the outer values read by subgraphs."""
    node = Node(proto.op_type, proto.input, proto.output, domain=proto.domain, name=proto.name,
                encoded=proto.SerializeToString(deterministic=True))  # fmt: skip
    node.captures = tuple(dict.fromkeys(name for body in bodies(proto) for name in _outer_reads(body)))
    return node


def _outer_reads(body: onnx.GraphProto) -> list[str]:
    defined = {"", *(info.name for info in body.input), *(tensor.name for tensor in body.initializer)}
    reads: list[str] = []
    for proto in body.node:
        inner = [name for nested in bodies(proto) for name in _outer_reads(nested)]
        reads.extend(name for name in (*proto.input, *inner) if name not in defined)
        defined.update(proto.output)
    reads.extend(info.name for info in body.output if info.name not in defined)
    return reads
