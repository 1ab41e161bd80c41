"""Shrinks dimensions: every dimension of one size becomes another size, in types, stored values and shapes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from gopt.offline.reduce.graph_view import GraphView
from gopt.operators.table import operator

SMALL = 2


def sizes(view: GraphView) -> list[int]:
    """Sizes above ``SMALL`` of dimensions of inputs and stored values, the largest first."""
    lengths: set[int] = set()
    for info in view.inputs.values():
        lengths.update(dim.dim_value for dim in info.type.tensor_type.shape.dim)
    for tensor in view.stored.values():
        lengths.update(tensor.dims)
    return sorted((size for size in lengths if size > SMALL), reverse=True)


def resized(view: GraphView, mapping: Mapping[int, int]) -> ModelProto:
    """The model with other sizes of dimensions; stored values keep the first elements.

    The caller checks that the result is a model: a product of other sizes has no meaning of its own."""
    model = ModelProto()
    model.CopyFrom(view.model)
    graph = model.graph
    shapes = {
        node.input[index] for node in graph.node for index in _lengths(node.op_type) if index < len(node.input)
    }  # fmt: skip
    for info in (*graph.input, *graph.output, *graph.value_info):
        _resize_type(info, mapping)
    for tensor in graph.initializer:
        _resize_tensor(tensor, mapping, tensor.name in shapes)
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    _resize_tensor(attribute.t, mapping, node.output[0] in shapes)
                elif attribute.ints and node.output[0] in shapes:
                    attribute.ints[:] = [mapping.get(size, size) for size in attribute.ints]
    return model


def _lengths(op_type: str) -> list[int]:
    """The operands with lengths of dimensions."""
    record = operator(op_type)
    return [*record.lengths] if record.shape is None else [*record.lengths, record.shape]


def _resize_type(info: ValueInfoProto, mapping: Mapping[int, int]) -> None:
    for dim in info.type.tensor_type.shape.dim:
        if dim.dim_value in mapping:
            dim.dim_value = mapping[dim.dim_value]


def _resize_tensor(tensor: TensorProto, mapping: Mapping[int, int], shape: bool) -> None:
    if tensor.data_type == TensorProto.STRING or not (shape or any(size in mapping for size in tensor.dims)):
        return
    array = numpy_helper.to_array(tensor)
    array = array[tuple(slice(mapping.get(size, size)) for size in array.shape)]
    if shape and array.dtype == np.int64:
        array = np.array([mapping.get(int(size), int(size)) for size in array.flat], np.int64).reshape(array.shape)
    raw = np.ascontiguousarray(array).reshape(array.shape)
    tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, raw.shape, raw.tobytes(), raw=True))
