"""Dimensions of operators working element by element, and of operators working on few dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from gopt.operators.dims.link import (
    DimFactor,
    DimFactors,
    OperatorUse,
    all_results,
    beside,
    first_of,
    given_of,
    kept,
    meets,
)


def elementwise(operator: OperatorUse) -> Iterator[DimFactor]:
    """Each dimension of the result, with dimensions of operands not broadcast along it."""
    out, count = operator.made(), len(operator.operands)
    for dim in range(len(out)):
        yield DimFactor(tuple(meets(operator.dims(index), out, dim) for index in range(count)), (dim,))


def of_first(operator: OperatorUse) -> Iterator[DimFactor]:
    """Each dimension of the first operand: bounds are scalars, and only the type of a type operand is read."""
    return kept(operator, range(operator.rank(0)))


def dropout(operator: OperatorUse) -> Iterator[DimFactor]:
    """Each dimension, if nothing is drawn: members would draw other numbers than a single device."""
    if operator.opset < 12:
        quiet = len(operator.results) == 1  # nothing is known about the content of a mask
    else:
        training = operator.constant(2) if operator.has(2) else False
        ratio = operator.constant(1) if operator.has(1) else None
        quiet = (training is not None and not training) or (ratio is not None and not ratio)
    return kept(operator, range(operator.rank(0) if quiet else 0))


def quantised(operator: OperatorUse) -> Iterator[DimFactor]:
    """Each dimension; scale and zero point are scalars, or have an element for each step of an axis, and are cut
    alike."""
    scale = operator.dims(1)
    axis = operator.axis(1)
    if len(scale) > 1 or operator.attributes.get("block_size", 0):
        return
    for dim in range(operator.rank(0)):
        cut = 0 if scale and dim == axis else None
        yield DimFactor(given_of(operator, dim, cut, cut), (dim,))


def axes_of(operator: OperatorUse) -> tuple[int, ...] | None:
    """The axes of a reduction, a Squeeze or the like; None if unknown."""
    rank = operator.rank(0)
    axes: Sequence[int] = ()
    if "axes" in operator.attributes:
        axes = operator.attributes["axes"]
    elif operator.has(1):
        value = operator.constant(1)
        if value is None:
            return None
        axes = value.reshape(-1).tolist()
    if not list(axes) and not operator.attributes.get("noop_with_empty_axes", 0):
        axes = range(rank)
    return tuple(sorted(axis % rank for axis in axes)) if rank else ()


def reduction(pieces: str) -> DimFactors:
    """Kept dimensions stay; reduced dimensions are reduced over members too, by the rule in ``pieces``."""
    return partial(_reduction, "" if pieces == "l2" else pieces)


def _reduction(op: str, operator: OperatorUse) -> Iterator[DimFactor]:
    axes = axes_of(operator)
    if axes is None:
        return
    keep = bool(operator.attributes.get("keepdims", 1))  # else runtimes give nothing a wrong shape
    type = operator.operands[0]
    for dim in range(operator.rank(0)):
        if dim not in axes:
            out = dim if keep else dim - sum(axis < dim for axis in axes)
            yield DimFactor(first_of(operator, dim), (out,), filled=not keep)
        elif op and (op != "mean" or (type is not None and "float" in type.dtype)):  # means of integers are cut off
            yield DimFactor(first_of(operator, dim), (None,), op, filled=not keep)


def arg(operator: OperatorUse) -> Iterator[DimFactor]:
    """Places of the largest or smallest along an axis: all other dimensions."""
    axis = operator.axis(0)
    for dim in range(operator.rank(0)):
        if dim != axis:
            keep = bool(operator.attributes.get("keepdims", 1))  # else runtimes give nothing a wrong shape
            yield DimFactor(first_of(operator, dim), (dim if keep else dim - (axis < dim),), filled=not keep)


def softmax(operator: OperatorUse) -> Iterator[DimFactor]:
    """All dimensions but the normalised; before operator set 13 those are all from ``axis`` on."""
    if operator.opset >= 13:
        return beside()(operator)
    return kept(operator, range(softmax_axes(operator)[0]))


def softmax_axes(operator: OperatorUse) -> tuple[int, ...]:
    """The dimensions over which Softmax, LogSoftmax or Hardmax normalises together."""
    if operator.opset >= 13:
        return (operator.axis(-1),)
    return tuple(range(operator.axis(1), operator.rank(0))) or (0,)


def running(operator: OperatorUse) -> Iterator[DimFactor]:
    """CumSum: all dimensions but the dimension named by the second operand."""
    axis = operator.constant(1)
    if axis is None:
        return iter(())
    chosen = int(axis.reshape(-1)[0]) % max(operator.rank(0), 1)
    return kept(operator, [dim for dim in range(operator.rank(0)) if dim != chosen])


def in_front(operator: OperatorUse) -> Iterator[DimFactor]:
    """A normalisation over the last dimensions: the dimensions in front, with scale and offset broadcast or cut."""
    dims, axis = operator.dims(0), operator.axis(-1)
    for dim in range(axis):
        rest = [meets(operator.dims(index), dims, dim) for index in range(1, len(operator.operands))]
        yield DimFactor((dim, *rest), all_results(operator, dim))


def triangle(operator: OperatorUse) -> Iterator[DimFactor]:
    """Trilu: dimensions in front of the matrices."""
    return kept(operator, range(operator.rank(0) - 2))


def one_hot(operator: OperatorUse) -> Iterator[DimFactor]:
    """Dimensions of the indices."""
    rank = operator.rank(0)
    axis = operator.axis(-1, rank + 1)
    for dim in range(rank):
        yield DimFactor(first_of(operator, dim), (dim + (dim >= axis),))


def reverse_sequence(operator: OperatorUse) -> Iterator[DimFactor]:
    """The samples, with the lengths; and dimensions that are neither samples nor time."""
    samples, time = operator.attributes.get("batch_axis", 1), operator.attributes.get("time_axis", 0)
    for dim in range(operator.rank(0)):
        if dim != time:
            yield DimFactor((dim, 0 if dim == samples else None), (dim,))
