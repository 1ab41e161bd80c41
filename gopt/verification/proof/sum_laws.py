"""Laws of products, reductions, exponentials and extremes: from a node to the expression of the result."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from gopt.ir.graph import Node
from gopt.operators.dims.elements import softmax_axes
from gopt.operators.kinds import COMBINERS, NORM_REDUCTIONS
from gopt.operators.operator import Operator, Slope
from gopt.verification.proof.attributes import frozen
from gopt.verification.proof.constants import Arrays
from gopt.verification.proof.forms import EXTREMES, Shape, elements
from gopt.verification.proof.ranges import applied
from gopt.verification.proof.selections import along, replaced
from gopt.verification.proof.stored_values import simplest

if TYPE_CHECKING:
    from gopt.verification.proof.operators import NodeReader

JOINED = {op: EXTREMES[how] for how, ops in COMBINERS.items() if how in EXTREMES for op in ops}
"""Operator of two extremes -> the form of the result."""
RUNNING = "CumSum"


def reduced(
    reader: NodeReader, node: Node, record: Operator, operands: Sequence[int], arrays: Arrays, after: Shape
) -> int | None:
    """A reduction over all elements, or a sum over some dimensions.

    A single extreme may be an element of the extremes along a dimension in the source."""
    expressions, number, before = reader.expressions, operands[0], reader.expressions.shape(operands[0])
    count, extreme = expressions.elements(number), EXTREMES.get(record.pieces or "")
    if len(arrays) > 1 and arrays[1] is None:
        return None
    if after is None or before is None or not count or not (extreme or reader.floating(node)):
        return None
    axes = _axes(node, arrays, len(before))
    if axes is None:
        return None
    keeps = node.attributes.get("keepdims", 1)
    due = tuple(1 if dim in axes else size for dim, size in enumerate(before) if keeps or dim not in axes)
    if after != due and elements(after) is not None:  # the file may say another
        return None
    if extreme:
        part = reader.part_in_source(node, operands, after) if elements(after) == 1 else None
        return expressions.extreme(extreme, [number], after) if part is None and elements(after) == 1 else part
    if node.is_in(NORM_REDUCTIONS):
        if record.slope(0) is Slope.BENT:
            number = applied(expressions, "Abs", (), [number])
        else:
            number = expressions.elementwise(lambda values: expressions.product(values, (2,)), [number])
    total = expressions.view(expressions.summed(number, axes), after)
    if record.pieces == "mean":
        return expressions.scaled(total, Fraction(elements(after) or 1, count))
    return applied(expressions, "Sqrt", (), [total]) if record.pieces == "l2" else total


def _axes(node: Node, arrays: Arrays, rank: int) -> tuple[int, ...] | None:
    """The dimensions that a reduction is over; None for a copy, and for a dimension that is named twice."""
    named = node.attributes.get("axes") if len(arrays) < 2 else arrays[1].reshape(-1).tolist()
    if not named and node.attributes.get("noop_with_empty_axes", 0):
        return None
    axes = sorted(int(axis) % rank for axis in named) if named else [*range(rank)]
    return tuple(axes) if len(set(axes)) == len(axes) else None


def running(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """Sums so far in a part of a dimension: the sums of the whole, less the sum of all that is in front of the part."""
    expressions, box = reader.expressions, reader.expressions.box(operands[0])
    if box is None or arrays[1] is None or not reader.floating(node):
        return None
    (whole, selection), axis = box, int(arrays[1].reshape(-1)[0]) % len(box[1])
    runs, size = selection[axis], int((expressions.shape(whole) or ())[axis] or 0)
    if runs is None or len(runs) != 1:
        return None
    start, stop = runs[0]
    front = expressions.take(whole, replaced(selection, axis))
    (number,) = reader.results(node, [front, operands[1]], [expressions.shape(front)])
    part = expressions.take(number, along(axis, runs, len(selection)))
    before = ((stop, size),) if node.attributes.get("reverse", 0) else ((0, start),)
    if before[0][0] == before[0][1]:
        return part
    front_sum = expressions.summed(expressions.take(whole, replaced(selection, axis, before)), (axis,))
    return expressions.elementwise(lambda pair: expressions.added(pair, (1, -1)), [part, front_sum])


def exponential(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    return reader.expressions.exp(operands[0]) if reader.floating(node) else None


def logarithm(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    return reader.expressions.log(operands[0]) if reader.floating(node) else None


def softmax(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """exp(x) / sum(exp(x))."""
    total, expressions = _normaliser(reader, node, operands, shape), reader.expressions
    if total is None:
        return None
    pair = [expressions.exp(operands[0]), total]
    return expressions.elementwise(lambda values: expressions.product(values, (1, -1)), pair)


def log_softmax(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """x - log(sum(exp(x)))."""
    total, expressions = _normaliser(reader, node, operands, shape), reader.expressions
    if total is None:
        return None
    pair = [operands[0], expressions.log(total)]
    return expressions.elementwise(lambda values: expressions.added(values, (1, -1)), pair)


def _normaliser(reader: NodeReader, node: Node, operands: Sequence[int], shape: Shape) -> int | None:
    """The sum of the exponentials of a softmax."""
    use, expressions = reader.use(node, operands, [shape]), reader.expressions
    if use is None or not reader.floating(node):
        return None
    return expressions.summed(expressions.exp(operands[0]), softmax_axes(use))


def gemm(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """A product, and the addend apart."""
    if len(operands) < 3 or not reader.floating(node):
        return None
    attributes = {name: value for name, value in node.attributes.items() if name != "beta"}
    product = Node(node.op_type, node.inputs[:2], node.outputs, attributes=attributes)
    (number,) = reader.results(product, operands[:2], [shape])
    added = reader.expressions.scaled(operands[2], simplest(np.float32(node.attributes.get("beta", 1.0))))
    return reader.expressions.elementwise(reader.expressions.added, [number, added])


def convolution(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """A convolution, and the bias of each channel apart."""
    if len(operands) < 3 or shape is None:
        return of_groups(reader, node, operands, shape)
    plain = Node(node.op_type, node.inputs[:2], node.outputs, attributes=node.attributes)
    (number,) = reader.results(plain, operands[:2], [shape])
    bias = reader.expressions.view(operands[2], (shape[1], *[1] * (len(shape) - 2)))
    return reader.expressions.elementwise(reader.expressions.added, [number, bias])


def of_groups(
    reader: NodeReader, node: Node, operands: Sequence[int], shape: Shape, *, transposed: bool = False
) -> int | None:
    """Some groups of a convolution: channels of the convolution of all groups."""
    if shape is None or len(operands) > 2:
        return None
    expressions, groups = reader.expressions, int(node.attributes.get("group", 1))
    data, kernel = (expressions.box(operand) for operand in operands)
    if data is None or kernel is None or any(data[1][:1] + data[1][2:]) or any(kernel[1][1:]):
        return None
    channels, rows = data[1][1] or (), kernel[1][0]
    read, made = ((expressions.shape(operands[0]) or ())[1] // groups, shape[1] // groups)  # type: ignore[operator]
    size = int((expressions.shape(data[0]) or ())[1] or 0)
    if any(start % read or stop % read for start, stop in channels):
        return None
    chosen = tuple((start // read * made, stop // read * made) for start, stop in channels)
    after, before = (size // read * made, *shape[2:]), (channels if transposed else chosen)
    if rows != before or (expressions.shape(kernel[0]) or ())[0] != (size if transposed else after[0]):
        return None
    whole = Node(node.op_type, node.inputs, node.outputs, attributes={**node.attributes, "group": size // read})
    due = (frozen(whole), 0), (data[0], kernel[0])
    if all(expressions.all[number][1:3] != due for number in expressions.readers(node.op_type, data[0])):
        return None  # channels of a sum, maybe
    (number,) = reader.results(whole, [data[0], kernel[0]], [(shape[0], *after)])
    return expressions.take(number, along(1, chosen, len(shape)))


def extreme(reader: NodeReader, node: Node, operands: Sequence[int], arrays: Arrays, shape: Shape) -> int | None:
    """The largest or smallest of numbers, or of flags."""
    for operand in operands:
        if reader.expressions.elements(operand) != 1 or reader.expressions.ranged(operand):
            return None
    return reader.expressions.extreme(JOINED[node.op_type], operands, shape)
