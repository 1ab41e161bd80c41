"""Small constants built from other constants, beyond shape inference.

An exporter that folds nothing writes the axes of a reduction as Constant, Reshape, Cast. Inference then knows no rank
behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from gopt import limits
from gopt.ir.attributes import attribute_value
from gopt.ir.graph import Graph, Node
from gopt.ir.node_kinds import record_of
from gopt.ir.opset import opset_of
from gopt.ir.tensor import Tensor
from gopt.ir.types import TensorType, dtype_name, numpy_dtype
from gopt.operators.kinds import CASTS, LINEAR_IN_FIRST, SCALES, SIZES, SPREADS, TYPED
from gopt.operators.moves import filled
from gopt.operators.operator import Kernel, Slope
from gopt.operators.table import operator

_SMALL = 64
"""Elements up to which a constant may be a shape, axes, or a place."""
_DEPTH = 64
"""Nodes in a row through which a constant is followed."""
_INTEGERS = frozenset({"int32", "int64", "bool"})
_KEEP_ZEROS = LINEAR_IN_FIRST | CASTS
_MALFORMED = (AttributeError, ValueError, IndexError, TypeError, KeyError, OverflowError)
"""Errors of kernels for a malformed node."""
_PLAIN = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
"""Attributes of Constant that are numbers and no tensors, with the type of the result."""


def fold_small(
    nodes: Sequence[Node],
    initializers: Mapping[str, Tensor],
    inputs: Mapping[str, object],
    types: Mapping[str, TensorType] = {},
) -> dict[str, np.ndarray]:
    """Values of at most 64 integers, made by nodes of constants alone, by name, without Constant nodes themselves.

    ``types``: sizes of these values are constants as well."""
    values: dict[str, np.ndarray | None] = {"": None}
    folded: dict[str, np.ndarray] = {}
    constants = {"", *(name for name, tensor in initializers.items() if name not in inputs and _may_be_shape(tensor))}
    for node in nodes:
        rule = _kernel(node)
        if rule is None and node.inputs:
            continue
        sized = types.get(node.inputs[0]) if types and node.is_in(SIZES) else None
        if sized is not None and sized.static and (size := measured(node, sized.dims)) is not None:
            values[node.outputs[0]] = folded[node.outputs[0]] = size
            constants.add(node.outputs[0])
            continue
        if not constants.issuperset(node.inputs) or len(node.outputs) != 1 or node.domain not in ("", "ai.onnx"):
            continue
        if rule is None:
            value = constant_value(node)
            if value is not None:
                values[node.outputs[0]] = value
                constants.add(node.outputs[0])
            continue
        operands = [values[name] if name in values else initializers[name].numpy() for name in node.inputs]
        try:
            result = np.asarray(rule(node.attributes, operands))
        except _MALFORMED:
            continue  # code that needs its type reports it
        if result.size <= _SMALL and result.dtype.name in _INTEGERS:
            values[node.outputs[0]] = folded[node.outputs[0]] = result
            constants.add(node.outputs[0])
    return folded


def fills(node: Node) -> bool:
    """Return whether an attribute of a Pad or a Resize is a number, not zero, used beside the elements."""
    return any(node.attributes.get(name, 0) for name in ("value", "extrapolation_value"))


def constant_value(node: Node) -> np.ndarray | None:
    """Return the value of a Constant node of at most 64 integers, else None."""
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
    """The value of a Constant by the attributes, in the type of the result; None for texts and sparse tensors."""
    for name, value in attributes.items():
        if name == "value" and isinstance(value, onnx.TensorProto):
            return np.asarray(onnx.numpy_helper.to_array(value))
        if name in _PLAIN:
            return np.array(value, _PLAIN[name])
    return None


def constant_of(node: NodeProto) -> np.ndarray | None:
    """The value of a Constant node of a model; None for other nodes."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return None
    return constant_array({attribute.name: attribute_value(attribute) for attribute in node.attribute})


class Constants:
    """The constants of a graph, each computed on demand: stored values, and results of nodes on constants alone, of at
    most ``limits.FOLDED_ELEMENTS`` elements. ``arrays``: values taken for constants."""

    def __init__(
        self, graph: Graph, producers: Mapping[str, Node] | None = None, arrays: Mapping[str, np.ndarray] = {}
    ) -> None:
        self._graph, self._producers = graph, graph.producers() if producers is None else producers
        self._known: dict[str, np.ndarray | None] = dict(arrays)
        self._uniform: dict[str, float | None] = {}

    @cached_property
    def opset(self) -> int:
        """The version of the standard operators the graph is written for."""
        return opset_of(self._graph.header)

    def value(self, name: str) -> np.ndarray | None:
        """The value of a constant; None for inputs, states, computed values, texts, and too large values."""
        return self._value(name, _DEPTH)

    def number(self, name: str) -> float | None:
        """A constant of size 1 as a number, None for anything else."""
        type = self._graph.type_of(name)
        value = self.value(name) if not type.static or type.elements == 1 else None
        if value is None or value.size != 1 or value.dtype.kind == "c":
            return None
        return float(value.reshape(-1)[0])

    def integers(self, name: str) -> list[int] | None:
        """The whole numbers of a constant, such as axes or a shape; None for any other value, and for ''."""
        value = self.value(name) if name else None
        return None if value is None or value.dtype.kind not in "iu" else [int(number) for number in value.reshape(-1)]

    def axes(self, node: Node, index: int = 1) -> list[int] | None:
        """Return the axes of a node, an attribute or operand ``index``, negative ones counted from the back; None if
        missing or computed."""
        if "axes" in node.attributes:
            return [int(number) for number in node.attributes["axes"]]
        return self.integers(node.inputs[index]) if len(node.inputs) > index else None

    def uniform(self, name: str) -> float | None:
        """Return the number in all elements of a constant, of any size; None if elements differ or are computed."""
        if name not in self._uniform:
            self._uniform[name] = self._only_number(name)
        return self._uniform[name]

    def zero(self, name: str) -> bool:
        """Return whether a value is a constant that is zero everywhere, of any size."""
        while (node := self._producers.get(name)) is not None and node.is_in(_KEEP_ZEROS) and not fills(node):
            name = node.inputs[0]
        return self.uniform(name) == 0

    def power(self, node: Node) -> float | None:
        """The power by which a positive factor of the first operand multiplies the result; None if unknown."""
        record = record_of(node)
        return record.power if record.raised_to is None else self.number(node.inputs[record.raised_to])

    def multiple(self, node: Node) -> tuple[str, float] | None:
        """The operand of a node with a known multiple of the operand for a result, and the multiple; or None."""
        record = record_of(node)
        if record.elementwise and record.linear_in_first:
            one = as_folded(node, [np.ones(1)])
            return None if one is None else (node.inputs[0], float(one[0]))
        for slot in (0, 1) if node.is_in(SCALES) else ():
            number = self.number(node.inputs[1 - slot]) if record.slope(slot) is Slope.LINEAR else None
            inverse = record.slope(1 - slot) is not Slope.LINEAR
            if number is not None and (number or not inverse):
                return node.inputs[slot], 1 / number if inverse else number
        return None

    def _only_number(self, name: str) -> float | None:
        while (node := self._producers.get(name)) is not None and node.is_in(SPREADS):
            name = node.inputs[0]
        fill = node is not None and node.is_a("ConstantOfShape")
        value = filled(node.attributes, [np.ones(1)]) if node is not None and fill else self.value(name)
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
        """Return the result of a node with constant operands."""
        if node.op_type == "Constant":
            value = constant_array(node.attributes)
            return None if value is None or value.dtype == object else value
        if node.op_type == "Identity":
            return self._value(node.inputs[0], depth)
        rule, kind = _kernel(node), self._graph.type_of(node.outputs[0])
        if node.is_in(SIZES):
            sizes = self.sizes(node.inputs[0])
            return None if sizes is None else measured(node, sizes)
        if (rule is None and node.op_type not in TYPED) or (kind.static and kind.elements > limits.FOLDED_ELEMENTS):
            return None
        operands: list[Any] = []
        for name in node.inputs[:1] if rule is None else node.inputs:
            operand = self._value(name, depth) if name else None
            if name and (operand is None or operand.size > (limits.FOLDED_ELEMENTS if kind.static else _SMALL)):
                return None
            operands.append(operand)
        if not operands or operands[0] is None:
            return None
        try:
            with np.errstate(all="ignore"):
                if rule is None:
                    return np.asarray(operands[0].astype(numpy_dtype(kind.dtype)))
                result = np.asarray(rule(node.attributes, operands))
        except _MALFORMED:
            return None  # code that needs its type reports it
        return result if result.size <= limits.FOLDED_ELEMENTS else None

    def sizes(self, name: str) -> tuple[int, ...] | None:
        """Return the dimensions of a value, if all are numbers."""
        type = self._graph.type_of(name)
        return tuple(type.dims) if type.static else None


def as_folded(node: Node, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the result of a node for some operands; None without a rule for the operator."""
    rule = _kernel(node)
    try:
        return None if rule is None else np.asarray(rule(node.attributes, operands))
    except _MALFORMED:
        return None


def measured(node: Node, dims: tuple[int, ...]) -> np.ndarray | None:
    """Return the result of a Shape or a Size for a value with dimensions ``dims``."""
    return as_folded(node, [np.broadcast_to(np.False_, dims)])


def as_constant(name: str, value: np.ndarray) -> onnx.NodeProto:
    """A Constant node making a folded value."""
    return onnx.helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(value))


def for_inference(node: Node, folded: Mapping[str, np.ndarray]) -> bytes:
    """Return a node of the file for onnx's inference, serialized: a folded node is a constant; a GroupNormalization,
    unknown to inference, becomes a node with the operand's type."""
    value = folded.get(node.outputs[0]) if folded and node.outputs else None
    if value is not None:
        return bytes(as_constant(node.outputs[0], value).SerializeToString())
    if node.is_a("GroupNormalization"):
        copy = onnx.helper.make_node("Identity", node.inputs[:1], node.outputs)
        return bytes(copy.SerializeToString())
    return node.encoded or b""


def _may_be_shape(tensor: Tensor) -> bool:
    return tensor.type.dtype in _INTEGERS and tensor.type.elements <= _SMALL


def _kernel(node: Node) -> Kernel | None:
    """The kernel of a node's operator; ``_cast`` of a Cast, whose type is an attribute."""
    return _cast if node.op_type == "Cast" else operator(node.op_type).kernel


def _cast(attributes: Mapping[str, Any], operands: Sequence[np.ndarray]) -> np.ndarray:
    return operands[0].astype(numpy_dtype(dtype_name(attributes["to"])))
