"""Converts a graph to a wider type: every float32, float16 and bfloat16 value becomes float64 (or float32)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto

from gopt.ir.attributes import make_attribute
from gopt.ir.graph import COMM, Graph, Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import LOW_PRECISION, TensorType, dtype_code
from gopt.runtime.emulate_half import TYPE_ATTRIBUTES
from gopt.runtime.inlined_functions import inlined
from gopt.runtime.proto import as_node

NARROW = frozenset({"float32", *LOW_PRECISION})
_CODES = frozenset(dtype_code(name) for name in NARROW)


def widened(graph: Graph, dtype: str) -> Graph:
    """The graph with every floating-point type replaced by ``dtype`` (float32 or float64), also inside control flow.

    Functions of the model are inlined. For finite differences, and to tell rounding errors from wrong arithmetic.
    """
    graph = inlined(graph)
    types = {name: _wider(type, dtype) for name, type in graph.types.items()}
    stored = {
        name: _wide_tensor(tensor, dtype) if tensor.type.dtype in NARROW else tensor
        for name, tensor in graph.initializers.items()
    }
    return replace(
        graph,
        nodes=[_wide_node(node, dtype) for node in graph.nodes],
        inputs={name: _wider(type, dtype) for name, type in graph.inputs.items()},
        outputs={name: _wider(type, dtype) for name, type in graph.outputs.items()},
        initializers=stored,
        types=types,
    )


def _wider(type: TensorType, dtype: str) -> TensorType:
    return TensorType(dtype, type.shape) if type.dtype in NARROW else type


def _wide_tensor(tensor: Tensor, dtype: str) -> Tensor:
    return Tensor(TensorType(dtype, tensor.type.shape), array=np.asarray(tensor.numpy()).astype(dtype, copy=False))


def _wide_node(node: Node, dtype: str) -> Node:
    """A copy of the node that may be edited. The NodeProto is shared where nothing inside changes."""
    proto = NodeProto()
    proto.CopyFrom(node.to_proto())
    _widen_proto(proto, dtype)
    wide = as_node(proto)
    wide.domain, wide.made_by, wide.sharding, wide.origin = node.domain, node.made_by, node.sharding, node.origin
    return wide


def _widen_proto(proto: NodeProto, dtype: str) -> None:
    for attribute in proto.attribute:
        if attribute.name in ("to", *TYPE_ATTRIBUTES) and attribute.i in _CODES:
            attribute.i = dtype_code(dtype)
        elif proto.domain == COMM and attribute.name == "dtype" and attribute.s.decode() in NARROW:
            attribute.s = dtype.encode()
        elif attribute.type == AttributeProto.TENSOR:
            _widen_message(attribute.t, dtype)
        elif attribute.type == AttributeProto.GRAPH:
            _widen_body(attribute.g, dtype)
        elif proto.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            value = np.array(attribute.f if attribute.name == "value_float" else list(attribute.floats), dtype)
            attribute.CopyFrom(make_attribute("value", onnx.numpy_helper.from_array(value)))


def _widen_message(tensor: TensorProto, dtype: str) -> None:
    if tensor.data_type in _CODES:
        value = np.asarray(onnx.numpy_helper.to_array(tensor)).astype(dtype)
        tensor.CopyFrom(onnx.numpy_helper.from_array(value, tensor.name))


def _widen_body(body: GraphProto, dtype: str) -> None:
    for node in body.node:
        _widen_proto(node, dtype)
    for tensor in body.initializer:
        _widen_message(tensor, dtype)
    for info in (*body.input, *body.output, *body.value_info):
        _widen_type(info.type, dtype)


def _widen_type(type: TypeProto, dtype: str) -> None:
    if type.HasField("tensor_type") and type.tensor_type.elem_type in _CODES:
        type.tensor_type.elem_type = dtype_code(dtype)
    elif type.HasField("sequence_type"):
        _widen_type(type.sequence_type.elem_type, dtype)
    elif type.HasField("optional_type"):
        _widen_type(type.optional_type.elem_type, dtype)
