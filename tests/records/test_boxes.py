"""Boxes: every part of a tensor taken out and put back, over one axis and over several, in runs, uneven and empty."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.records.boxes import all_boxes, box_elements, box_of, box_shape, in_grid, put, ranges_of, rows_of, take
from gopt.records.placements import FULLY_REPLICATED, FlatShard, OnMember, Shard, Sharding

SHARDINGS = [
    Sharding.along("tp", Shard(0, (20, 0, 13))),
    Sharding.along("tp", Shard(1, (33, 32))),
    Sharding.along("tp", Shard(1, (7, 6), runs=5)),
    Sharding.along("tp", Shard(0, (0, 11), runs=3)),
    Sharding((("tp", Shard(1, (7, 6), runs=5)), ("ep", Shard(0, (17, 16))))),
    Sharding((("tp", Shard(0, (1, 32))), ("sp", Shard(1, (65, 0))))),
]
WHOLE = np.arange(33 * 65, dtype=np.float32).reshape(33, 65)


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_parts_put_back_are_the_whole(sharding, order):
    whole = np.array(WHOLE, order=order)
    made, elements = np.full(WHOLE.shape, -1, np.float32), 0
    for box in all_boxes(sharding, WHOLE.shape):
        part = take(whole, box)
        assert part.shape == box_shape(box)
        assert part.size == box_elements(box)
        put(made, box, part.reshape(-1), 0)
        elements += part.size
    assert (made == WHOLE).all()
    assert elements == WHOLE.size, "no element is in two boxes"


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_a_part_may_come_in_pieces(sharding, piece):
    made = np.full(WHOLE.shape, -1, np.float32)
    for box in all_boxes(sharding, WHOLE.shape):
        flat = take(WHOLE, box).reshape(-1)
        for start in range(0, flat.size, piece) if piece > 1 else [0]:
            stop = flat.size if piece == 1 else start + piece
            put(made, box, flat[start:stop], start)
    assert (made == WHOLE).all()


def test_a_box_is_what_its_rank_has():
    sharding = SHARDINGS[4]
    box = box_of(sharding, WHOLE.shape, {"tp": 1, "ep": 0, "dp": 3})
    assert box == ((0, 17), (7, 13, 20, 26, 33, 39, 46, 52, 59, 65))
    assert ranges_of(box[1])[:2] == [(7, 13), (20, 26)]
    assert take(WHOLE, box)[0, :8].tolist() == [7, 8, 9, 10, 11, 12, 20, 21]
    one = box_of(SHARDINGS[1], WHOLE.shape, {"tp": 1})
    assert np.shares_memory(take(WHOLE, one), WHOLE), "one range of each dimension is not copied"


def test_a_tensor_that_is_whole_has_no_box():
    assert box_of(FULLY_REPLICATED, WHOLE.shape, {"tp": 1}) is None
    assert list(all_boxes(FULLY_REPLICATED, WHOLE.shape)) == [None]
    assert take(WHOLE, None) is WHOLE
    made = np.zeros_like(WHOLE)
    put(made, None, WHOLE.reshape(-1)[5:9], 5)
    assert made.reshape(-1)[4:10].tolist() == [0, 5, 6, 7, 8, 0]


def test_a_box_of_nothing():
    box = box_of(SHARDINGS[0], WHOLE.shape, {"tp": 1})
    assert box is not None
    assert (box_shape(box), box_elements(box), take(WHOLE, box).shape) == ((0, 65), 0, (0, 65))


@pytest.mark.parametrize("sharding", [*SHARDINGS, FULLY_REPLICATED])
def test_the_boxes_of_a_sharding_tile(sharding):
    boxes = set(all_boxes(sharding, WHOLE.shape))
    assert in_grid(boxes, WHOLE.shape)
    assert len(boxes) == 1 or not in_grid(set(sorted(boxes)[:-1]), WHOLE.shape) or not box_elements(max(boxes))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 2), (0, 4))],  # a row is missing
        [((0, 2), (0, 4)), ((1, 3), (0, 4))],  # one is there twice
        [((0, 3), (0, 2)), ((0, 2), (2, 4))],  # an element is missing, and ranges of both dimensions fit
        [((0, 2), (0, 2)), ((2, 3), (2, 4))],  # a grid with two holes
        [None, ((0, 2), (0, 4)), ((2, 3), (0, 4))],
        [((0, 3), (0, 2, 1, 4))],  # ranges that overlap
        [((0, 3), (0, 4)), ((0, 3), (0, 4))],
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
    assert rows_of(((2, 5), (0, 4), (0, 2)), (9, 4, 2)) == (16, 40)
    assert rows_of(((2, 5), (0, 4), (0, 1)), (9, 4, 2)) is None
    assert rows_of(((2, 5), (1, 4), (0, 2)), (9, 4, 2)) is None


def test_boxes_of_two_axes_of_one_dimension():
    sharding = Sharding((("tp", Shard(0, (4, 4))), ("ep", Shard(0, (2, 2), runs=2))))
    boxes = [box_of(sharding, (8, 3), {"tp": tp, "ep": ep}) for tp in (0, 1) for ep in (0, 1)]
    assert boxes == [((start, start + 2), (0, 3)) for start in (0, 2, 4, 6)]
    assert in_grid(boxes, (8, 3)) and set(boxes) == set(all_boxes(sharding, (8, 3)))
    runs = Sharding((("tp", Shard(0, (2, 2), runs=2)), ("ep", Shard(0, (1, 1), runs=4))))
    assert box_of(runs, (8, 3), {"tp": 1, "ep": 0})[0] == (2, 3, 6, 7)


def test_a_tensor_of_no_dimensions_has_no_rows():
    assert rows_of((), ()) is None


@pytest.mark.parametrize("place", [FlatShard.whole((0, 1000, 2145)), OnMember(1)])
def test_what_shards_no_dimension_makes_no_box(place):
    """Along another axis ranks may share out a bucket, or one of them has all."""
    assert box_of(Sharding.along("shard", place), WHOLE.shape, {"shard": 1}) is None
    assert list(all_boxes(Sharding.along("shard", place), WHOLE.shape)) == [None]
    both = Sharding((("shard", place), ("tp", Shard(0, (20, 13)))))
    assert box_of(both, WHOLE.shape, {"shard": 1, "tp": 1}) == ((20, 33), (0, 65))
    assert list(all_boxes(both, WHOLE.shape)) == [((0, 20), (0, 65)), ((20, 33), (0, 65))]
