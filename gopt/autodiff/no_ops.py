"""Operators without effect, or without movement: rules for single nodes with operands of known shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gopt.autodiff.values import Values
from gopt.ir.graph import Node
from gopt.ir.node_kinds import in_proportion, order_of
from gopt.operators.kinds import RESHAPES


def aliased(node: Node, values: Values) -> str | None:
    """Return the value repeated by a node with one result, element for element; None for other nodes."""
    rule = _ALIASES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    return rule(node, values) if rule is not None and node.inputs and node.inputs[0] else None


def as_reshape(node: Node, values: Values) -> Node:
    """Return a node that only regroups elements as a Reshape of the value behind such nodes; others unchanged."""
    if node.domain not in ("", "ai.onnx") or len(node.outputs) != 1 or not node.inputs:
        return node
    after, before = values.shape(node.outputs[0]), values.shape(node.inputs[0])
    if after is None or before is None or 0 in after:
        return node
    source = node.inputs[0]
    order = order_of(node, len(before)) or ()
    real = [axis for axis in order if before[axis] != 1]
    if node.is_in(RESHAPES) or (order and real == sorted(real)):
        while (maker := values.producers.get(source)) is not None and maker.is_in(RESHAPES):
            source = maker.inputs[0]
        target = values.constant(np.array(after, np.int64))
        return Node("Reshape", [source, target], node.outputs, name=node.name)
    base, perm = _turned(source, values, order) if order else (source, order)
    if base != source:
        return Node("Transpose", [base], node.outputs, name=node.name, attributes={"perm": [*perm]})
    return node


def _turned(source: str, values: Values, order: Sequence[int]) -> tuple[str, Sequence[int]]:
    """The operand of dimensions in an order, or of another order in front of it, and the order from there."""
    maker = values.producers.get(source)
    inner = order_of(maker, len(order)) if maker is not None else None
    return (source, order) if maker is None or not inner else (maker.inputs[0], [inner[axis] for axis in order])


def _same_type(node: Node, values: Values) -> str | None:
    types = values.graph.types
    before, after = types.get(node.inputs[0]), types.get(node.outputs[0])
    return node.inputs[0] if before is not None and before.static and before == after else None


def _reshape(node: Node, values: Values) -> str | None:
    """Return a value in its old shape after regrouping alone."""
    after, source = values.shape(node.outputs[0]), node.inputs[0]
    while after is not None:
        if values.shape(source) == after:
            return source
        maker = values.producers.get(source)
        if maker is None or not maker.is_in(RESHAPES):
            break
        source = maker.inputs[0]
    return None


def _transpose(node: Node, values: Values) -> str | None:
    shape = values.shape(node.inputs[0])
    if shape is None:
        return None
    own = order_of(node, len(shape)) or ()
    base, order = _turned(node.inputs[0], values, own)
    if [*own] == sorted(own):
        return node.inputs[0]
    return base if order == sorted(order) else None


def _cast(node: Node, values: Values) -> str | None:
    types = values.graph.types
    before, after = types.get(node.inputs[0]), types.get(node.outputs[0])
    return node.inputs[0] if before is not None and after is not None and before.dtype == after.dtype else None


def _pad(node: Node, values: Values) -> str | None:
    pads = values.integers(node.inputs[1]) if len(node.inputs) > 1 else None
    return node.inputs[0] if pads is not None and not any(pads) else None


def _slice(node: Node, values: Values) -> str | None:
    steps = values.integers(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] else []
    return None if steps is None or any(step < 0 for step in steps) else _same_type(node, values)


def _only_one(node: Node, values: Values) -> str | None:
    return node.inputs[0] if len(node.inputs) == 1 else None


def _neutral(node: Node, values: Values) -> str | None:
    """A product with ones, a quotient by ones: constant ones alone, and of the same shape."""
    types, after = values.graph.types, values.graph.types.get(node.outputs[0])
    for side, neutral in (node.inputs, node.inputs[::-1]):
        value = values.array(neutral) if in_proportion(node, side) and types.get(side) == after else None
        if value is not None and value.size <= 1024 and (value == 1).all():
            return side
    return None


def _reduction(node: Node, values: Values) -> str | None:
    """A sum, mean or extremum along kept dimensions of length 1."""
    shape = values.shape(node.inputs[0])
    if shape is None or values.shape(node.outputs[0]) != shape:
        return None
    axes = values.integers(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else []
    if axes is None:
        return None
    if not axes:
        return node.inputs[0] if node.attributes.get("noop_with_empty_axes") or set(shape) <= {1} else None
    return node.inputs[0] if all(shape[axis] == 1 for axis in axes) else None


_ALIASES: dict[str, Callable[[Node, Values], str | None]] = {
    "Identity": lambda node, values: node.inputs[0],
    "Expand": _same_type,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Unsqueeze": _reshape,
    "Flatten": _reshape,
    "Transpose": _transpose,
    "Cast": _cast,
    "CastLike": _cast,
    "Pad": _pad,
    "Slice": _slice,
    "Sum": _only_one,
    "Concat": _only_one,
    "Mul": _neutral,
    "Div": _neutral,
    "ReduceSum": _reduction,
    "ReduceMean": _reduction,
    "ReduceMax": _reduction,
}
