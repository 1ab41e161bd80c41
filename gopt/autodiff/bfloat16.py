"""Models in bfloat16: onnx-ad writes no bfloat16 constants, and gets float64 instead, which holds the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TypeProto, helper, numpy_helper

from gopt.autodiff.operators import bodies
from gopt.errors import UnsupportedError
from gopt.ir.nodes import nested

_TYPES = frozenset({"to", "dtype", "output_dtype", "output_datatype"})
"""Attributes that hold the number of an element type."""


def uses(model: ModelProto, code: int) -> bool:
    """Return whether a value, a constant or an attribute of the model has this element type."""
    return any(used == code for used in _codes(model))


def as_float64(model: ModelProto) -> ModelProto:
    """The model with float64 in place of bfloat16. Raises UnsupportedError for a model with both."""
    if uses(model, TensorProto.DOUBLE):
        raise UnsupportedError(
            "the model computes in bfloat16 and in float64: onnx-ad has no bfloat16, and gopt shows it float64 instead",
            "cast to float32 in place of float64",
        )
    return _with(model, TensorProto.BFLOAT16, TensorProto.DOUBLE)


def as_bfloat16(model: ModelProto) -> ModelProto:
    """The model with bfloat16 in place of float64."""
    return _with(model, TensorProto.DOUBLE, TensorProto.BFLOAT16)


def _graphs(model: ModelProto) -> Iterator[GraphProto]:
    yield model.graph
    yield from bodies(model.graph.node)


def _values(graph: GraphProto) -> Iterator[TypeProto.Tensor]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type"):
            yield value.type.tensor_type


def _attributes(model: ModelProto) -> Iterator[AttributeProto]:
    for node in nested(model.graph.node):
        yield from node.attribute


def _codes(model: ModelProto) -> Iterator[int]:
    for graph in _graphs(model):
        yield from (value.elem_type for value in _values(graph))
        yield from (tensor.data_type for tensor in graph.initializer)
    for attribute in _attributes(model):
        if attribute.name in _TYPES:
            yield attribute.i
        if attribute.HasField("t"):
            yield attribute.t.data_type


def _with(model: ModelProto, old: int, new: int) -> ModelProto:
    result = deepcopy(model)
    for graph in _graphs(result):
        for value in _values(graph):
            if value.elem_type == old:
                value.elem_type = new
        for tensor in graph.initializer:
            _convert(tensor, old, new)
    for attribute in _attributes(result):
        if attribute.name in _TYPES and attribute.i == old:
            attribute.i = new
        if attribute.HasField("t"):
            _convert(attribute.t, old, new)
    return result


def _convert(tensor: TensorProto, old: int, new: int) -> None:
    if tensor.data_type == old:
        array = np.asarray(numpy_helper.to_array(tensor)).astype(helper.tensor_dtype_to_np_dtype(new))
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
