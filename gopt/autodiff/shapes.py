"""Shapes of a backward: shape computations of onnx-ad are folded, so that inference sees every dimension."""

from __future__ import annotations

from copy import deepcopy

import onnx

from gopt.autodiff.simplify import constant_result
from gopt.autodiff.values import Values
from gopt.ir.graph import Graph
from gopt.ir.tensor import Tensor
from gopt.ir.type_proto import read_type, value_info
from gopt.ir.types import TensorType

_ROUNDS = 8
"""A fold may settle a shape, which settles the next fold."""
_COUNTS = frozenset({"int64", "int32", "bool"})


def settle_shapes(graph: Graph) -> None:
    """Fold small whole numbers and infer types again, until every type is known or nothing changes."""
    for _ in range(_ROUNDS):
        open_ = sum(not graph.type_of(name).static for node in graph.nodes for name in node.outputs if name)
        if not open_:
            return
        fold_integers(graph)
        _infer(graph)
        unsettled = sum(not graph.type_of(name).static for node in graph.nodes for name in node.outputs if name)
        if unsettled == open_:
            return


def fold_integers(graph: Graph) -> None:
    """Store small whole numbers computed from constants and known shapes in place of the nodes."""
    values, nodes = Values(graph), []
    outer = {*graph.outputs, *(name for node in graph.nodes for name in node.captures)}
    for node in graph.nodes:
        value = None
        name = node.outputs[0]
        if len(node.outputs) == 1 and name not in outer and graph.type_of(name).dtype in _COUNTS:
            value = constant_result(node, values)
        if value is None:
            nodes.append(node)
        else:
            graph.types[name] = TensorType(graph.type_of(name).dtype, value.shape)
            graph.initializers[name] = Tensor(graph.types[name], array=value)
    graph.nodes = nodes


def _infer(graph: Graph) -> None:
    model = deepcopy(graph.header)
    body = model.graph
    body.name = graph.name
    body.node.extend(node.to_proto() for node in graph.nodes)
    body.input.extend(value_info(name, kind) for name, kind in graph.inputs.items())
    body.output.extend(value_info(name, kind) for name, kind in graph.outputs.items())
    for name, tensor in graph.initializers.items():
        if name in graph.inputs:
            continue
        if tensor.type.dtype in _COUNTS and tensor.nbytes <= 1024:
            body.initializer.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
        else:
            body.input.append(value_info(name, tensor.type))
    for info in onnx.shape_inference.infer_shapes(model, data_prop=True).graph.value_info:
        kind = read_type(info.type)
        if not graph.type_of(info.name).static and kind.dtype != "undefined":
            graph.types[info.name] = kind
