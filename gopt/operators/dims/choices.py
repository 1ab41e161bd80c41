"""Dimensions of operators in which indices choose along a dimension.

If the dimension is split, the link is masked: a member runs an operator of ``gopt.spmd`` on its part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gopt.operators.dims.link import DimFactor, Index, OperatorUse


def gather(operator: OperatorUse) -> Iterator[DimFactor]:
    """Other dimensions of the data, dimensions of the indices, and the indexed dimension."""
    count, axis = operator.rank(1), operator.axis(0)
    for dim in range(operator.rank(0)):
        if dim != axis:
            yield DimFactor((dim, None), (dim if dim < axis else dim + count - 1,))
    for dim in range(count):
        yield DimFactor((None, dim), (axis + dim,))
    yield DimFactor((axis, None), (None,), "sum", masked=True)


def gather_elements(operator: OperatorUse) -> Iterator[DimFactor]:
    """Other dimensions, of data and indices alike; dimensions of indices where data has more is not a link."""
    axis = operator.axis(0)
    for dim in range(operator.rank(0)):
        if dim != axis and operator.size(0, dim) == operator.size(1, dim):
            yield DimFactor((dim, dim), (dim,))
    yield DimFactor((None, axis), (axis,))
    yield DimFactor((axis, None), (None,), "sum", masked=True)


def gather_nd(operator: OperatorUse) -> Iterator[DimFactor]:
    """Samples, dimensions of the indices, and unindexed dimensions of the data."""
    count, samples = operator.rank(1), operator.attributes.get("batch_dims", 0)
    chosen = samples + operator.size(1, count - 1)
    for dim in range(count - 1):
        yield DimFactor((dim if dim < samples else None, dim), (dim,))
    for dim in range(chosen, operator.rank(0)):
        yield DimFactor((dim, None), (count - 1 + dim - chosen,))


def scatter_elements(operator: OperatorUse) -> Iterator[DimFactor]:
    """Other dimensions, all cut alike; and the indexed dimension, without others' updates."""
    axis = operator.axis(0)
    for dim in range(operator.rank(0)):
        if dim != axis and operator.size(0, dim) == operator.size(1, dim):
            yield DimFactor((dim, dim, dim), (dim,))
    yield DimFactor((axis, None, None), (axis,), masked=True)


def scatter_nd(operator: OperatorUse) -> Iterator[DimFactor]:
    """Unindexed dimensions; and the first, if a single index chooses from it alone: masked, or by runs if one of
    several equal runs is written whole."""
    rank, count = operator.rank(0), operator.rank(1)
    chosen = operator.size(1, count - 1)
    for dim in range(chosen, rank):
        yield DimFactor((dim, None, dim - chosen + count - 1), (dim,))
    if chosen == 1:
        yield DimFactor((0, None, None), (0,), masked=True)
    if run_written(operator) is not None:
        length = operator.size(1, 0)
        row = Index(0, runs=operator.size(0, 0) // length)
        yield DimFactor((row, None, 0), (row,))


def run_written(operator: OperatorUse) -> int | None:
    """Return the index of the equal run of the first dimension written in order by a ScatterND: the gradient of a
    Slice. None for other places, or all."""
    if operator.rank(1) != 2 or operator.size(1, 1) != 1:
        return None
    at, length = operator.constant(1), operator.size(0, 0)
    if at is None or not at.size or at.size == length or length % at.size or int(at[0, 0]) % at.size:
        return None
    start = int(at[0, 0])
    return start // at.size if (at[:, 0] == np.arange(start, start + at.size)).all() and start >= 0 else None
