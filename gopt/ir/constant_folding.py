"""Small constants that are put together from other constants: what shape inference does not follow by itself.

An exporter that folds nothing writes the axes of a reduction as Constant, Reshape, Cast. Inference then knows no rank
behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from gopt.ir.graph import Node
from gopt.ir.tensor import Tensor
from gopt.ir.types import dtype_name, numpy_dtype

_SMALL = 64
"""Elements up to which a constant may be a shape, axes, or a place."""
_INTEGERS = frozenset({"int32", "int64", "bool"})
_PLAIN = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
"""Attributes of Constant that are numbers and no tensors, with the type of the result."""


def fold_small(
    nodes: Sequence[Node], initializers: Mapping[str, Tensor], inputs: Mapping[str, object]
) -> dict[str, np.ndarray]:
    """Values of at most 64 integers that nodes make of constants alone, by name; Constant nodes themselves left out."""
    known: dict[str, np.ndarray] = {}
    folded: dict[str, np.ndarray] = {}
    constants = {"", *(name for name, tensor in initializers.items() if name not in inputs and _may_be_shape(tensor))}
    for node in nodes:
        rule = _RULES.get(node.op_type)
        if rule is None and node.op_type != "Constant":
            continue
        if not constants.issuperset(node.inputs) or len(node.outputs) != 1 or not node.is_a(node.op_type):
            continue
        if rule is None:
            value = constant_value(node)
            if value is not None:
                known[node.outputs[0]] = value
                constants.add(node.outputs[0])
            continue
        if not node.inputs:
            continue
        operands = [known[name] if name in known else initializers[name].numpy() for name in node.inputs if name]
        try:
            result = np.asarray(rule(node, [np.asarray(operand) for operand in operands]))
        except (ValueError, IndexError, TypeError, KeyError):
            continue  # a malformed node: code that needs its type reports it
        if result.size <= _SMALL and result.dtype.name in _INTEGERS:
            known[node.outputs[0]] = folded[node.outputs[0]] = result
            constants.add(node.outputs[0])
    return folded


def constant_value(node: Node) -> np.ndarray | None:
    """The value of a Constant node of at most 64 integers; None of any other."""
    proto = node.proto
    if proto is None:
        return None
    for attribute in proto.attribute:
        if attribute.name == "value" and attribute.HasField("t"):
            if dtype_name(attribute.t.data_type) in _INTEGERS and np.prod(attribute.t.dims) <= _SMALL:
                return np.asarray(onnx.numpy_helper.to_array(attribute.t))
        elif attribute.name == "value_ints" and len(attribute.ints) <= _SMALL:
            return np.array(attribute.ints, np.int64)
        elif attribute.name == "value_int":
            return np.array(attribute.i, np.int64)
    return None


def constant_array(attributes: Mapping[str, Any]) -> np.ndarray | None:
    """The value of a Constant by its attributes, in the type of its result; None for texts and sparse tensors."""
    for name, value in attributes.items():
        if name == "value" and isinstance(value, onnx.TensorProto):
            return np.asarray(onnx.numpy_helper.to_array(value))
        if name in _PLAIN:
            return np.array(value, _PLAIN[name])
    return None


def filled(sizes: Sequence[int], attributes: Mapping[str, Any]) -> np.ndarray | None:
    """The result of a ConstantOfShape by its attributes; None above 64 elements: a large one is no shape."""
    if math.prod(sizes) > _SMALL:
        return None
    value = attributes.get("value")
    return np.full(sizes, np.float32(0) if value is None else onnx.numpy_helper.to_array(value).reshape(-1)[0])


def as_constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    """A Constant node that makes a folded value."""
    return onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(value))


def _may_be_shape(tensor: Tensor) -> bool:
    return tensor.type.dtype in _INTEGERS and tensor.type.elements <= _SMALL


def _reshaped(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray:
    old = operands[0].shape
    wanted = [int(size) for size in operands[1]]
    if not node.attributes.get("allowzero", 0):
        wanted = [old[place] if size == 0 else size for place, size in enumerate(wanted)]
    return operands[0].reshape(wanted)


def _axes(node: Node, operands: Sequence[np.ndarray]) -> tuple[int, ...] | None:
    given = operands[1].tolist() if len(operands) > 1 else node.attributes.get("axes")
    return None if given is None else tuple(int(axis) for axis in given)


def _cast(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray:
    return operands[0].astype(numpy_dtype(dtype_name(node.attributes["to"])))


def _filled(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray:
    result = filled([int(size) for size in operands[0].reshape(-1)], node.attributes)
    if result is None:
        raise ValueError("large")
    return result


def _range(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray:
    numbers = range(*(int(each) for each in operands))
    if len(numbers) > _SMALL:
        raise ValueError("large")
    return np.array(numbers, operands[0].dtype)


_RULES: dict[str, Callable[[Node, Sequence[np.ndarray]], np.ndarray]] = {
    "Identity": lambda node, operands: operands[0],
    "Cast": _cast,
    "Reshape": _reshaped,
    "Squeeze": lambda node, operands: np.squeeze(operands[0], _axes(node, operands)),
    "Unsqueeze": lambda node, operands: np.expand_dims(operands[0], _axes(node, operands) or ()),
    "Concat": lambda node, operands: np.concatenate(operands, int(node.attributes["axis"])),
    "ConstantOfShape": _filled,
    "Range": _range,
    "Neg": lambda node, operands: -operands[0],
    "Add": lambda node, operands: operands[0] + operands[1],
    "Sub": lambda node, operands: operands[0] - operands[1],
    "Mul": lambda node, operands: operands[0] * operands[1],
    "Gather": lambda node, operands: np.take(operands[0], operands[1], int(node.attributes.get("axis", 0))),
}
