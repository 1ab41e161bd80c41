"""The reference for every engine, for all members at once, in NumPy.

Each function takes a call already checked and the members' inputs in group order. Results are fresh memory of each
member, since an engine may update them in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from gopt.collectives.call import Array, Call, Results
from gopt.collectives.layout import HALVES, parse_shapes, total_elements

Contributions = Sequence[Sequence[Array]]

COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
"""Reduction -> function that combines two contributions; a mean is divided at the end."""


def reduced(arrays: Sequence[Array], how: str) -> Array:
    """Arrays of one shape and dtype combined from first to last, as a new array of the same shape and dtype.

    Halves are combined in float32 and rounded once. NaN wins over any maximum or minimum; overflow gives infinity,
    needed by a loss scale, without a warning."""
    head = arrays[0]
    wide = np.dtype(np.float32) if head.dtype.name in HALVES else head.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.array(head, dtype=wide)
        for array in arrays[1:]:
            COMBINE[how](total, array.astype(wide, copy=False), out=total)
        if how == "mean":
            np.divide(total, len(arrays), out=total)
        return total.astype(head.dtype, copy=False)


def all_reduce(call: Call, contributions: Contributions) -> Results:
    totals = _totals(call, contributions)
    return [[total.copy() for total in totals] for _ in contributions]


def reduce(call: Call, contributions: Contributions) -> Results:
    totals = _totals(call, contributions)
    return [totals if member == call["root"] else None for member in range(len(contributions))]


def broadcast(call: Call, contributions: Contributions) -> Results:
    return [[array.copy() for array in contributions[call["root"]]] for _ in contributions]


def reduce_scatter(call: Call, contributions: Contributions) -> Results:
    totals = _totals(call, contributions)
    if call.has("cuts"):
        bucket = np.concatenate([total.reshape(-1) for total in totals])
        shards = np.split(bucket, call["cuts"][1:-1])
    else:
        shards = slices(totals[0], call["axis"], call["sizes"])
    return [[shard.copy()] for shard in shards]


def all_gather(call: Call, contributions: Contributions) -> Results:
    shards = [contribution[0] for contribution in contributions]
    if call.has("axis"):
        return [[np.concatenate(shards, call["axis"])] for _ in contributions]
    shapes = parse_shapes(call["shapes"])
    ends = list(accumulate(total_elements([shape]) for shape in shapes))
    result: Results = []
    for _ in contributions:
        pieces = np.split(np.concatenate(shards), ends[:-1])
        result.append([piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)])
    return result


def all_to_all(call: Call, contributions: Contributions) -> Results:
    pieces = [slices(contribution[0], call["split_axis"], call["split_sizes"]) for contribution in contributions]
    return [
        [np.concatenate([cut[member] for cut in pieces], call["concat_axis"])] for member in range(len(contributions))
    ]


def transfer(call: Call, contributions: Contributions) -> Results:
    """Send and Recv: of two members, the member without inputs gets the other's."""
    sent = [array for contribution in contributions for array in contribution]
    return [[] if contribution else [array.copy() for array in sent] for contribution in contributions]


def slices(array: Array, axis: int, sizes: Sequence[int]) -> list[Array]:
    """The parts of an array, of these sizes along an axis."""
    return np.split(array, list(accumulate(sizes))[:-1], axis)


def _totals(call: Call, contributions: Contributions) -> list[Array]:
    return [reduced(arrays, call["reduce"]) for arrays in zip(*contributions, strict=True)]
