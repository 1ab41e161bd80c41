"""Dimensions of operators that move elements: reshapes, cuts, joins, repetitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod

import numpy as np

from gopt.operators.dims.link import DimFactor, Index, OperatorUse, Slot, Strategy, first_of, meets
from gopt.records.placements import REPLICATED, Placement, Shard


def transpose(operator: OperatorUse) -> Iterator[DimFactor]:
    """Each dimension, at its new place."""
    perm = operator.attributes.get("perm") or list(reversed(range(operator.rank(0))))
    for out, dim in enumerate(perm):
        yield DimFactor((dim,), (out,))


def expand(operator: OperatorUse) -> Iterator[DimFactor]:
    """Existing dimensions stay; members make new dimensions in their own length."""
    out = operator.made()
    for dim in range(len(out)):
        yield DimFactor((meets(operator.dims(0), out, dim), None), (dim,))


def tile(operator: OperatorUse) -> Iterator[DimFactor]:
    """Each dimension; a repeated dimension gives as many runs in the result."""
    for dim, (before, after) in enumerate(zip(operator.dims(0), operator.made())):
        if before and after:
            yield DimFactor(first_of(operator, dim), (Index(dim, runs=after // before),))


def sliced(operator: OperatorUse) -> Iterator[DimFactor]:
    """Uncut dimensions; and a dimension with one of several equal runs taken."""
    steps = operator.constant(4) if operator.has(4) else np.ones(1, np.int64)
    if steps is None or (steps < 1).any():
        return
    runs = run_taken(operator)
    for dim, (old, new) in enumerate(zip(operator.dims(0), operator.made())):
        if old == new:
            yield DimFactor(first_of(operator, dim), (dim,))
        elif dim in runs:
            yield DimFactor(first_of(operator, Index(dim, runs=old // new)), (dim,))


def run_taken(operator: OperatorUse) -> dict[int, int]:
    """Dimension -> the equal run taken by a Slice: of queries, keys and values in one tensor, the keys are run 1."""
    starts, rank = (operator.constant(1) if operator.has(1) else None), operator.rank(0)
    axes = operator.constant(3) if operator.has(3) else np.arange(rank)
    steps = operator.constant(4) if operator.has(4) else np.ones(1, np.int64)
    if starts is None or axes is None or steps is None or (steps != 1).any():
        return {}
    runs = {}
    for start, axis in zip(starts.reshape(-1).tolist(), axes.reshape(-1).tolist()):
        dim = axis % rank
        old, new = operator.size(0, dim), operator.made()[dim]
        low = max(start + old, 0) if start < 0 else start
        if 0 < new < old and old % new == 0 and low % new == 0:
            runs[dim] = low // new
    return runs


def padded(operator: OperatorUse) -> Iterator[DimFactor]:
    """Dimensions without padding in front or behind."""
    rank = operator.rank(0)
    pads = operator.attributes.get("pads")
    if pads is None:
        value = operator.constant(1) if operator.has(1) else None
        if value is None:
            return
        pads = value.tolist()
    axes: Sequence[int] = range(rank)
    if operator.has(3):
        chosen = operator.constant(3)
        if chosen is None:
            return
        axes = [int(axis) % rank for axis in chosen.reshape(-1)]
    touched = {axis for index, axis in enumerate(axes) if pads[index] or pads[index + len(axes)]}
    for dim in range(rank):
        if dim not in touched:
            yield DimFactor(first_of(operator, dim), (dim,))


def concat(operator: OperatorUse) -> Iterator[DimFactor]:
    """All dimensions; of equal pieces, the joined dimension too, as runs."""
    axis, count = operator.axis(0), len(operator.operands)
    for dim in range(operator.rank(0)):
        if dim != axis:
            yield DimFactor((dim,) * count, (dim,))
    if len({operator.size(index, axis) for index in range(count)}) == 1:
        yield DimFactor((axis,) * count, (Index(axis, runs=count),))


def split(operator: OperatorUse) -> Iterator[DimFactor]:
    """The inverse of Concat."""
    axis, count = operator.axis(0), len(operator.results)
    for dim in range(operator.rank(0)):
        if dim != axis:
            yield DimFactor(first_of(operator, dim), (dim,) * count)
    pieces = {operator.made(number)[axis] for number in range(count) if operator.results[number] is not None}
    if len(pieces) == 1 and pieces == {operator.size(0, axis) // count} and operator.size(0, axis) % count == 0:
        yield DimFactor(first_of(operator, Index(axis, runs=count)), (axis,) * count)


def reshape(operator: OperatorUse, slot: Slot, shard: Shard) -> Iterator[Strategy]:
    """Dimensions that are split and joined: Reshape, Flatten, Squeeze, Unsqueeze."""
    if slot.place:
        return
    rest: tuple[Placement, ...] = (REPLICATED,) * (len(operator.operands) - 1)
    before, after = operator.dims(0), operator.made()
    if slot.result:
        before, after = after, before
    for moved in reshaped(shard, before, after):
        if operator.opset < 14 and 0 in shard.sizes and moved.dim != shard.dim:
            continue  # if allowzero is unset, a 0 in the shape copies the operand's length
        operand, result = (moved, shard) if slot.result else (shard, moved)
        yield Strategy((operand, *rest), (result,))


def reshaped(shard: Shard, before: Sequence[int], after: Sequence[int]) -> list[Shard]:
    """The same elements of a tensor in another shape; several if a length of 1 leaves the choice, best first.

    Seen flat, a member has ``sizes`` of each of ``pre`` runs, in units of ``post`` elements; in the new shape, too, for
    a dimension with the same borders of runs.
    """
    run, post = sum(shard.sizes), prod(before[shard.dim + 1 :])
    pre = prod(before[: shard.dim]) * shard.runs
    if not prod(before):
        return []
    shards = []
    for dim, (outer, size) in enumerate(zip(accumulate((1, *after), lambda a, b: a * b), after)):
        inner = prod(after[dim + 1 :])
        if pre % outer or size % (pre // outer):
            continue
        runs = pre // outer
        if size // runs * inner != run * post or any(size * post % inner for size in shard.sizes):
            continue
        shards.append(Shard(dim, tuple(size * post // inner for size in shard.sizes), runs))
    return sorted(shards, key=lambda shard: (shard.runs, -shard.length))
