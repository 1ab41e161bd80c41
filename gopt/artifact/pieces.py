"""A piece: a range of elements of a tensor of the source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from gopt.documents.records import OPTIONAL, Count, Positive
from gopt.ir.tensor import Tensor
from gopt.ir.types import nbytes, numpy_dtype
from gopt.records import boxes
from gopt.records.boxes import Box

Place = tuple[Box | None, tuple[int, int] | None]
"""Coordinates in which the elements of a piece are counted: a box, and a range of its rows.

Hashable, for pieces of one tensor.
"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a flattened tensor of the source, or of a ``box``: a rank's part of sharded
    dimensions, a list of ranges per dimension."""

    tensor: str
    """The piece belongs to the state of the source with this name."""
    start: Count
    """The piece starts at this element, counted from 0."""
    stop: Count
    """The piece ends before this element."""
    box: Box | None = field(default=None, metadata=OPTIONAL)
    """The box is the part of the tensor that the rank has where dimensions are sharded, inside which the elements of
    the piece are counted, row-major; without a box they are counted in the whole tensor. A box has a list for each
    dimension, such as [[0, 16], [0, 8, 16, 24]] for all 16 rows and for columns 0 to 8 and 16 to 24, with several
    ranges where a dimension is several runs and the rank has a part of each, as in a weight that makes queries, keys
    and values at once: start and stop of each range that is inside the box, in order and without overlap."""
    every: tuple[Count, Positive] | None = field(default=None, metadata=OPTIONAL)
    """The elements of the piece are counted in every step-th row of the tensor, from a first one on; the key is absent
    where they are counted in all rows. The first element is the number of the first row. The second element is the step
    from row to row."""

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> Place:
        """Coordinates for counting ``start`` and ``stop``."""
        return self.box, self.every


def place_shape(region: Place, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape in which pieces of a place are counted; ``shape``: the tensor's."""
    box, every = region
    size = tuple(shape) if box is None else boxes.box_shape(box)
    return size if every is None else (len(range(every[0], size[0], every[1])), *size[1:])


def place_runs(region: Place, shape: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """For each dimension of a place the runs: the start there, the start in the tensor, and the length."""
    (box, every), sides = region, []
    for dimension, size in enumerate(shape):
        ranges = [(0, size)] if box is None else boxes.ranges_of(box[dimension])
        if every is not None and not dimension:
            start_row, step = every
            ranges = [(row, row + 1) for row in [row for ends in ranges for row in range(*ends)][start_row::step]]
        start, runs = 0, []
        for begin, end in ranges:
            runs.append((start, begin, end - begin))
            start += end - begin
        sides.append(runs)
    return sides


def cut(piece: Piece, whole: np.ndarray) -> np.ndarray:
    """Return the elements of a piece from a whole source tensor, 1-D; a view if possible."""
    part = boxes.take(whole, piece.box)
    if piece.every is not None:
        part = part[piece.every[0] :: piece.every[1]]
    return part.reshape(-1)[piece.start : piece.stop]


def cover(pieces: Iterable[Piece], shape: Sequence[int]) -> bool:
    """Return whether pieces together have all elements of a tensor: in ranges, boxes of a grid, or every n-th row."""
    spans: dict[Place, set[tuple[int, int]]] = {}
    for piece in pieces:
        spans.setdefault(piece.place, set()).add((piece.start, piece.stop))
    complete, turns = set(), set[tuple[int, int]]()
    for region, ranges in spans.items():
        end = 0
        for start, stop in sorted(ranges):
            end = max(end, stop) if start <= end else end
        if end >= prod(place_shape(region, shape)):
            if region[1] is None:
                complete.add(region[0])
            elif region[0] is None:
                turns.add(region[1])
    if any(turns.issuperset((first, step) for first in range(min(step, shape[0]))) for _, step in turns):
        return True
    return None in complete or boxes.in_grid(complete, shape)


BLOCK = 1 << 24
"""Bytes of a file that are read at once, where only a part of each row is needed."""


def cut_stored(piece: Piece, tensor: Tensor) -> np.ndarray:
    """As ``cut``, in new memory, from a stored tensor; only the piece's rows are read from a file, in blocks."""
    dims = tensor.type.dims
    of_file = tensor.path and tensor.array is None and tensor.type.elements
    if not of_file or (piece.box is not None and len(piece.box[0]) > 2):
        return np.array(cut(piece, np.asarray(tensor.read())))
    if piece.place == (None, None):
        return tensor.flat_slice(piece.start, piece.stop).numpy()
    (start, stop), rest = ((0, dims[0]), None) if piece.box is None else (piece.box[0], piece.box[1:])
    offset, step = piece.every or (0, 1)
    array = np.empty(place_shape(piece.place, dims), numpy_dtype(tensor.type.dtype))
    width, end = prod(dims[1:]), 0
    block = max(BLOCK // max(nbytes(tensor.type.dtype, width), 1), 1) * step
    read = tensor.flat()
    for row in range(start + offset, stop, block):
        last = min(row + block, stop)
        rows = read(row * width, last * width).reshape(last - row, *dims[1:])[::step]
        if rest is not None:
            rows = boxes.take(rows, ((0, len(rows)), *rest))
        array[end : end + len(rows)] = rows
        end += len(rows)
    return array.reshape(-1)[piece.start : piece.stop]


def put(whole: np.ndarray, region: Place, flat: np.ndarray, start: int) -> None:
    """Write elements ``start`` and following of a place into a whole tensor."""
    box, every = region
    if every is None:
        boxes.put(whole, box, flat, start)
        return
    of_box = boxes.take(whole, box)
    rows = of_box[every[0] :: every[1]]
    if flat.size == prod(rows.shape):
        rows[...] = flat.reshape(rows.shape)
    else:
        copied = rows.reshape(-1).copy()
        copied[start : start + flat.size] = flat
        rows[...] = copied.reshape(rows.shape)
    if box is not None:  # a box of several ranges is a copy
        boxes.put(whole, box, of_box.reshape(-1), 0)
