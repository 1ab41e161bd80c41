"""Boxes: a member's part of a tensor with sharded dimensions, one list of ranges per dimension.

A box is ``((0, 16), (0, 8, 16, 24))``: all 16 rows, and of the columns 0 to 8 and 16 to 24. A part of a box is counted
in the box's elements, row-major."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Annotated

import numpy as np

from gopt.documents.records import Bounds, Count
from gopt.records.placements import Shard, Sharding

Box = tuple[Annotated[tuple[Count, ...], Bounds(min_items=2)], ...]


def box_of(sharding: Sharding, shape: Sequence[int], coordinates: Mapping[str, int]) -> Box | None:
    """Return a rank's box of a tensor; None for the whole tensor."""
    box: list[tuple[int, ...]] = [(0, size) for size in shape]
    sharded = [(axis, position) for axis, position in sharding.by_axis if isinstance(position, Shard)]
    for axis, placement in sharded:
        box[placement.dim] = _both(box[placement.dim], placement.parts(coordinates[axis]), shape[placement.dim])
    return tuple(box) if sharded else None


def _both(dimension: tuple[int, ...], parts: Sequence[tuple[int, int]], size: int) -> tuple[int, ...]:
    """Intersect the ranges of a dimension with parts."""
    if dimension == (0, size):
        return tuple(end for part in parts for end in part)
    overlaps = ((max(start, low), min(stop, last)) for start, stop in ranges_of(dimension) for low, last in parts)
    return tuple(end for start, stop in overlaps if start < stop for end in (start, stop))


def all_boxes(sharding: Sharding, shape: Sequence[int]) -> Iterator[Box | None]:
    """The boxes that together are all of a tensor, members of the last axis first."""
    axes = [(axis, len(position.sizes)) for axis, position in sharding.by_axis if isinstance(position, Shard)]
    for members in product(*(range(count) for _, count in axes)):
        yield box_of(sharding, shape, {axis: member for (axis, _), member in zip(axes, members)})


def ranges_of(dimension: Sequence[int]) -> list[tuple[int, int]]:
    """``(0, 8, 16, 24)`` -> ``[(0, 8), (16, 24)]``."""
    return list(zip(dimension[::2], dimension[1::2]))


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box's contents."""
    return tuple(sum(stop - start for start, stop in ranges_of(dimension)) for dimension in box)


def box_elements(box: Box) -> int:
    """Return the number of elements of a box."""
    return prod(box_shape(box))


def in_grid(boxes: Collection[Box | None], shape: Sequence[int]) -> bool:
    """Return whether distinct boxes tile a tensor as a grid: each dimension has the same ranges everywhere.

    Along each dimension ranks hold one of a few parts, so that the held boxes form a grid. Linear in the boxes, for a
    tensor of any size."""
    sides: list[set[tuple[int, ...]]] = [set() for _ in shape]
    for box in boxes:
        for side, ends in zip(sides, box or [(0, size) for size in shape]):
            side.add(tuple(ends))
    return len(boxes) == prod(map(len, sides)) and all(map(_shared_out, sides, shape))


def _shared_out(side: Iterable[tuple[int, ...]], size: int) -> bool:
    """Return whether ranges cover a dimension without gaps or overlaps."""
    position = 0
    for start, stop in sorted(part for ends in side for part in ranges_of(ends)):
        if start != position:
            return False
        position = stop
    return position == size


def rows_of(box: Box, shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the range of flattened elements of a box of whole rows, else None."""
    if not box or len(box[0]) != 2 or any(ends != (0, size) for ends, size in zip(box[1:], shape[1:])):
        return None
    row = prod(shape[1:])
    return box[0][0] * row, box[0][1] * row


def take(array: np.ndarray, box: Box | None) -> np.ndarray:
    """Return the box of a whole tensor; the tensor itself if the box is None."""
    return array if box is None else array[_index(box)]


def put(array: np.ndarray, box: Box | None, flat: np.ndarray, start: int) -> None:
    """Write elements ``start`` and following of a box into a whole tensor."""
    if box is None:
        array.reshape(-1)[start : start + flat.size] = flat
        return
    index, shape = _index(box), box_shape(box)
    if flat.size == prod(shape):
        array[index] = flat.reshape(shape)
        return
    part = array[index].reshape(-1)
    part[start : start + flat.size] = flat
    array[index] = part.reshape(shape)


def _index(box: Box) -> tuple[slice, ...] | tuple[np.ndarray, ...]:
    """Slices where every dimension is one range, else lists of positions."""
    if all(len(dimension) == 2 for dimension in box):
        return tuple(slice(*dimension) for dimension in box)
    return np.ix_(*(np.concatenate([np.arange(*part) for part in ranges_of(dimension)]) for dimension in box))
