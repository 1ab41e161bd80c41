"""Small constants that are put together from other constants: what shape inference does not follow by itself.

An exporter that folds nothing writes the axes of a reduction as Constant, Reshape, Cast. Inference then knows no rank
behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx

from gopt import limits
from gopt.ir.graph import Graph, Node
from gopt.ir.opset import opset_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import dtype_name, numpy_dtype

_SMALL = 64
"""Elements up to which a constant may be a shape, axes, or a place."""
_DEPTH = 64
"""Nodes in a row through which a constant is followed."""
_INTEGERS = frozenset({"int32", "int64", "bool"})
_LAYOUT = frozenset({"Expand", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Identity"})
"""Operators whose result has the elements of their first operand, none changed."""
_KEEP_ZEROS = _LAYOUT | {"Cast", "Neg"}
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
    """The result of a ConstantOfShape by its attributes; None where it would be too large."""
    if math.prod(sizes) > limits.FOLDED_ELEMENTS:
        return None
    value = attributes.get("value")
    return np.full(sizes, np.float32(0) if value is None else onnx.numpy_helper.to_array(value).reshape(-1)[0])


class Constants:
    """The constants of a graph, each computed when it is asked for: what the file stores, and what nodes make of
    constants alone, of at most ``limits.FOLDED_ELEMENTS`` elements. ``given``: values that are taken for constants."""

    def __init__(
        self, graph: Graph, producers: Mapping[str, Node] | None = None, given: Mapping[str, np.ndarray] = {}
    ) -> None:
        self._graph, self._producers = graph, graph.producers() if producers is None else producers
        self._known: dict[str, np.ndarray | None] = dict(given)
        self._uniform: dict[str, float | None] = {}

    @cached_property
    def opset(self) -> int:
        """The version of the standard operators that the graph is written for."""
        return opset_of(self._graph.header)

    def value(self, name: str) -> np.ndarray | None:
        """The value of a constant; None for inputs, states, computed values, texts, and what would be too large."""
        return self._value(name, _DEPTH)

    def number(self, name: str) -> float | None:
        """A constant of one element as a number, None for anything else."""
        type = self._graph.type_of(name)
        value = self.value(name) if not type.static or type.elements == 1 else None
        if value is None or value.size != 1 or value.dtype.kind == "c":
            return None
        return float(value.reshape(-1)[0])

    def integers(self, name: str) -> list[int] | None:
        """The whole numbers of a constant, such as axes or a shape; None for any other value, and for ''."""
        value = self.value(name) if name else None
        return None if value is None or value.dtype.kind not in "iu" else [int(each) for each in value.reshape(-1)]

    def axes(self, node: Node, place: int = 1) -> list[int] | None:
        """The axes that a node names, as an attribute or as operand ``place``, from the back where they are negative;
        None where it names none, or where they are computed."""
        if "axes" in node.attributes:
            return [int(each) for each in node.attributes["axes"]]
        return self.integers(node.inputs[place]) if len(node.inputs) > place else None

    def uniform(self, name: str) -> float | None:
        """The number that each element of a constant is, of any size; None where they differ or are computed."""
        if name not in self._uniform:
            self._uniform[name] = self._only_number(name)
        return self._uniform[name]

    def zero(self, name: str) -> bool:
        """Return whether a value is a constant that is zero everywhere, of any size."""
        while (node := self._producers.get(name)) is not None and node.is_in(_KEEP_ZEROS):
            name = node.inputs[0]
        return self.uniform(name) == 0

    def _only_number(self, name: str) -> float | None:
        while (node := self._producers.get(name)) is not None and node.is_in(_LAYOUT):
            name = node.inputs[0]
        fill = node is not None and node.is_a("ConstantOfShape")
        value = filled([1], node.attributes) if node is not None and fill else self.value(name)
        if value is None or not value.size or value.dtype.kind not in "biufV":
            return None
        flat = value.reshape(-1)
        return float(flat[0]) if flat[0] == flat[-1] and bool((flat == flat[0]).all()) else None

    def _value(self, name: str, depth: int) -> np.ndarray | None:
        if name in self._known:
            return self._known[name]
        node, result = self._producers.get(name), None
        if node is None:
            tensor = self._graph.initializers.get(name)
            if tensor is not None and name not in self._graph.inputs and tensor.type.dtype != "string":
                result = np.asarray(tensor.numpy())
        elif depth and len(node.outputs) == 1 and node.domain in ("", "ai.onnx"):
            result = self._made(node, depth - 1)
        if result is None or result.size <= _SMALL:
            self._known[name] = result
        return result

    def _made(self, node: Node, depth: int) -> np.ndarray | None:
        """The result of a node, where all that it reads are constants."""
        if node.op_type == "Constant":
            value = constant_array(node.attributes)
            return None if value is None or value.dtype == object else value
        if node.op_type == "Identity":
            return self._value(node.inputs[0], depth)
        rule, made = _RULES.get(node.op_type) or _TYPED.get(node.op_type), self._graph.type_of(node.outputs[0])
        if rule is None or (made.static and made.elements > limits.FOLDED_ELEMENTS):
            return None
        if node.op_type in ("Shape", "Size"):
            sizes = self.sizes(node.inputs[0])
            if sizes is None or node.op_type == "Size":
                return None if sizes is None else np.array(math.prod(sizes), np.int64)
            return np.array(sizes[node.attributes.get("start", 0) : node.attributes.get("end")], np.int64)
        operands: list[np.ndarray] = []
        for name in node.inputs[:1] if node.op_type == "CastLike" else filter(None, node.inputs):
            operand = self._value(name, depth)
            if operand is None or operand.size > (limits.FOLDED_ELEMENTS if made.static else _SMALL):
                return None
            operands.append(operand)
        if not operands:
            return None
        try:
            with np.errstate(all="ignore"):
                if node.op_type == "CastLike":
                    return operands[0].astype(numpy_dtype(made.dtype))
                result = np.asarray(rule(node, operands))
        except (ValueError, IndexError, TypeError, KeyError, OverflowError):
            return None  # a malformed node: code that needs its type reports it
        return result if result.size <= limits.FOLDED_ELEMENTS else None

    def sizes(self, name: str) -> tuple[int, ...] | None:
        """The dimensions of a value, where all of them are numbers."""
        type = self._graph.type_of(name)
        return tuple(type.dims) if type.static else None


def as_folded(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """The result of a node for some operands; None where there is no rule for its operator."""
    rule = _RULES.get(node.op_type) or _TYPED.get(node.op_type)
    try:
        return None if rule is None else np.asarray(rule(node, operands))
    except (ValueError, IndexError, TypeError, KeyError):
        return None  # a malformed node


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

_TYPED: dict[str, Callable[[Node, Sequence[np.ndarray]], np.ndarray]] = {
    "Shape": lambda node, operands: operands[0],
    "Size": lambda node, operands: operands[0],
    "CastLike": lambda node, operands: operands[0],
    "Expand": lambda node, operands: np.broadcast_to(
        operands[0], np.broadcast_shapes(operands[0].shape, tuple(operands[1].tolist()))
    ),
    "Div": lambda node, operands: _divided(*operands),
    "Sqrt": lambda node, operands: np.sqrt(operands[0]),
    "Reciprocal": lambda node, operands: 1 / operands[0],
    "Log": lambda node, operands: np.log(operands[0]),
    "Max": lambda node, operands: np.maximum.reduce(operands),
    "Min": lambda node, operands: np.minimum.reduce(operands),
    "ReduceSum": lambda node, operands: _reduced(np.sum, node, operands),
    "ReduceProd": lambda node, operands: _reduced(np.prod, node, operands),
    "Slice": lambda node, operands: _sliced(*operands),
    "Transpose": lambda node, operands: np.transpose(operands[0], node.attributes.get("perm")),
}
"""Operators that only ``Constants`` folds: they need types, or make floating numbers."""


def _divided(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if left.dtype.kind not in "iu":
        return np.asarray(left / right)
    if not right.all():
        raise ValueError("divided by zero")
    return np.asarray(np.sign(left) * np.sign(right) * (np.abs(left) // np.abs(right)))


def _reduced(how: Callable[..., np.ndarray], node: Node, operands: Sequence[np.ndarray]) -> np.ndarray:
    axes = _axes(node, operands)
    if not axes and node.attributes.get("noop_with_empty_axes", 0):
        return operands[0]
    made = how(operands[0], axis=axes or None, keepdims=bool(node.attributes.get("keepdims", 1)))
    return np.asarray(made, operands[0].dtype)


def _sliced(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    places = range(len(starts)) if axes is None else axes.tolist()
    by = np.ones(len(starts), np.int64) if steps is None else steps
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(places, starts.tolist(), ends.tolist(), by.tolist(), strict=True):
        cut[axis] = slice(start, None if step < 0 and end < -data.shape[axis] else end, step)
    return data[tuple(cut)]
