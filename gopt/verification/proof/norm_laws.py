"""Norms and pools over all places as sums and extremes: ranks with a part of the places write them so."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from gopt.ir.graph import Node
from gopt.ir.node_kinds import record_of
from gopt.ir.opset import opset_of
from gopt.ir.types import TensorType
from gopt.operators.kinds import GLOBAL_POOLS, PART_NORMS
from gopt.verification.proof.forms import Shape
from gopt.verification.proof.ranges import applied
from gopt.verification.proof.stored_values import simplest

if TYPE_CHECKING:
    from gopt.verification.proof.operators import NodeReader


def results(reader: NodeReader, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int] | None:
    """The results by the definition of the operator; None for one without a definition here."""
    defined = node.is_in(PART_NORMS) or node.op_type in GLOBAL_POOLS or record_of(node).running
    if not defined or not all(map(reader.expressions.elements, operands)) or not reader.floating(node):
        return None
    if node.is_in(PART_NORMS):
        return _group_norm(reader, node, operands)
    if record_of(node).running:
        return _batch_norm(reader, node, operands)
    return _global_pool(reader, node, operands, shapes) if node.op_type in GLOBAL_POOLS else None


def _mean(reader: NodeReader, number: int, axes: Collection[int]) -> int:
    sizes = reader.expressions.shape(number) or ()
    count = prod(int(sizes[axis] or 0) for axis in axes)
    return reader.expressions.scaled(reader.expressions.summed(number, axes), Fraction(1, count))


def _places(reader: NodeReader, number: int) -> range:
    return range(2, len(reader.expressions.shape(number) or ()))


def _global_pool(reader: NodeReader, node: Node, operands: Sequence[int], shapes: Sequence[Shape]) -> list[int]:
    op_type, axes = GLOBAL_POOLS[node.op_type], tuple(_places(reader, operands[0]))
    if opset_of(reader.graph.header) < 18:
        return reader.results(Node(op_type, node.inputs, node.outputs, attributes={"axes": axes}), operands, shapes)
    name, settings = f"{node.outputs[0]}.axes", np.array(axes, np.int64)
    graph = replace(reader.graph, types=reader.graph.types | {name: TensorType("int64", settings.shape)})
    reduction = Node(op_type, [*node.inputs, name], node.outputs)
    return reader.of_graph(graph).results(reduction, [*operands, reader.expressions.from_array(settings)], shapes)


def _batch_norm(reader: NodeReader, node: Node, operands: Sequence[int]) -> list[int] | None:
    """A norm by the mean and the variance of all samples and places, and both as running statistics."""
    if not node.attributes.get("training_mode", 0):
        return None
    expressions, (value, scale, offset, *running) = reader.expressions, operands
    axes = (0, *_places(reader, value))
    mean = _mean(reader, value, axes)
    moved = expressions.elementwise(lambda pair: expressions.added(pair, (1, -1)), [value, mean])
    variance = _mean(reader, _squared(reader, moved), axes)
    momentum = simplest(np.float32(node.attributes.get("momentum", 0.9)))
    rows = [expressions.view(number, _row(reader, value)) for number in (scale, offset)]
    results = [_normal(reader, node, moved, variance, *rows)]
    for before, new in zip(running, (mean, variance)):
        flat = expressions.view(new, expressions.shape(before))
        parts = [expressions.scaled(before, momentum), expressions.scaled(flat, 1 - momentum)]
        results.append(expressions.elementwise(expressions.added, parts))
    return results[: len(node.outputs)] if all(node.outputs) else None


def _group_norm(reader: NodeReader, node: Node, operands: Sequence[int]) -> list[int] | None:
    """A norm by the mean and the variance of all places of the channels of a group, or of each channel."""
    expressions, (value, scale, offset) = reader.expressions, operands
    samples, channels, *sizes = (int(size or 0) for size in expressions.shape(value) or ())
    groups = int(node.attributes.get("num_groups", channels))
    apart = samples, groups, channels // groups

    def mean(number: int) -> int:
        """The mean of a group, for each of its channels."""
        number = _mean(reader, number, _places(reader, value))
        if groups == channels:
            return number
        spread = expressions.linear({_mean(reader, expressions.view(number, apart), (2,)): 1}, apart)
        return expressions.view(spread, (samples, channels, *[1 for _ in sizes]))

    rows = [expressions.view(number, _row(reader, value)) for number in (scale, offset)]
    moved = expressions.elementwise(lambda pair: expressions.added(pair, (1, -1)), [value, mean(value)])
    return [_normal(reader, node, moved, mean(_squared(reader, moved)), *rows)]


def _row(reader: NodeReader, number: int) -> tuple[int | str | None, ...]:
    """The shape of a number for each channel of a value."""
    return ((reader.expressions.shape(number) or ())[1], *[1 for _ in _places(reader, number)])


def _squared(reader: NodeReader, number: int) -> int:
    return reader.expressions.elementwise(lambda values: reader.expressions.product(values, (2,)), [number])


def _normal(reader: NodeReader, node: Node, moved: int, variance: int, scale: int, offset: int) -> int:
    """moved / sqrt(variance + epsilon) * scale + offset."""
    expressions = reader.expressions
    epsilon = simplest(np.float32(node.attributes.get("epsilon", 1e-5)))
    shape = expressions.shape(variance)
    apart = expressions.elementwise(expressions.added, [variance, expressions.constant(epsilon, shape)])
    factors = [moved, applied(expressions, "Sqrt", (), [apart]), scale]
    normal = expressions.elementwise(lambda values: expressions.product(values, (1, -1, 1)), factors)
    return expressions.elementwise(expressions.added, [normal, offset])
