"""Boxes: what they hold of a tensor, and whether they tile it, by arithmetic alone."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.sharding.boxes import all_boxes, box_elements, box_of, in_grid, put, rows_of, take
from gopt.sharding.placements import Shard, Sharding

ROWS = Sharding.along("tp", Shard(0, (2, 1, 0)))
RUNS = Sharding.along("tp", Shard(1, (2, 1), runs=3))
BOTH = Sharding((("ep", Shard(0, (1, 2))), ("tp", Shard(1, (2, 1), runs=3))))
SHARDED = [(ROWS, (3, 7)), (RUNS, (3, 9)), (BOTH, (3, 9)), (Sharding.along("tp", Shard(2, (3, 3, 1))), (2, 1, 7))]


@pytest.mark.parametrize(("sharding", "shape"), SHARDED, ids=str)
def test_boxes_of_a_sharding_tile_and_put_undoes_take(sharding, shape):
    whole = np.arange(np.prod(shape)).reshape(shape)
    boxes = list(all_boxes(sharding, shape))
    assert in_grid(boxes, shape)
    back = np.full(shape, -1)
    for box in boxes:
        part = take(whole, box)
        assert part.size == box_elements(box)
        for start in (0, part.size // 2):  # whole, then its second half once more
            put(back, box, part.reshape(-1)[start:], start)
    assert (back == whole).all()


def test_runs_are_several_ranges_of_a_dimension():
    assert box_of(RUNS, (3, 9), {"tp": 1}) == ((0, 3), (2, 3, 5, 6, 8, 9))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 2), (0, 4))],  # a row is missing
        [((0, 2), (0, 4)), ((1, 3), (0, 4))],  # one is there twice
        [((0, 3), (0, 2)), ((0, 2), (2, 4))],  # an element is missing, and ranges of both dimensions fit
        [((0, 2), (0, 2)), ((2, 3), (2, 4))],  # a grid with two holes
        [None, ((0, 2), (0, 4)), ((2, 3), (0, 4))],
        [((0, 3), (0, 2, 1, 4))],  # ranges that overlap
        [],
    ],
    ids=str,
)
def test_boxes_that_leave_or_repeat_elements(boxes):
    assert not in_grid(boxes, (3, 4))


def test_the_whole_tensor_is_a_grid():
    assert in_grid([None], (3, 4)) and in_grid([()], ()) and in_grid([None], ())


def test_tiling_is_judged_without_the_tensor():
    rows, count = 1 << 40, 1 << 10
    step = rows // count
    boxes = [((at * step, (at + 1) * step), (0, rows)) for at in range(count)]
    assert in_grid(boxes, (rows, rows)) and not in_grid(boxes[1:], (rows, rows))


def test_rows_lie_in_one_piece():
    assert rows_of(((2, 5), (0, 4)), (9, 4)) == (8, 20)
    assert rows_of(((2, 5), (0, 3)), (9, 4)) is None
    assert rows_of(((0, 1, 3, 4), (0, 4)), (9, 4)) is None
