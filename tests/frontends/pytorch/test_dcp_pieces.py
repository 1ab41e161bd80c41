"""Chunks of pieces: boxes of the tensor that hold the elements of the pieces, over the rank's memory."""

import math

import numpy as np
import pytest

from gopt.artifact.pieces import Piece, cut, place_shape
from gopt.ir.types import TensorType

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
dcp_pieces = pytest.importorskip("gopt.frontends.pytorch.dcp_pieces")
SHAPE = (5, 4, 6)
PLACES = {
    "whole": (None, None), "a box": (((1, 4), (0, 4), (0, 2, 3, 6)), None), "every second row": (None, (1, 2)),
    "rows of a box": (((0, 2, 3, 5), (1, 3), (0, 6)), (0, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_chunks_of_pieces_have_the_elements_of_the_pieces(name):
    place, random = PLACES[name], np.random.default_rng(0)
    whole = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    size = math.prod(place_shape(place, SHAPE))
    for _ in range(200):
        start, stop = sorted(random.integers(0, size + 1, 2).tolist())
        piece = Piece("w", start, stop, *place)
        flat = torch.from_numpy(np.array(cut(piece, whole)))
        chunks = dcp_pieces.TensorChunks(TensorType("float32", SHAPE))
        chunks.add(piece, flat)
        for offsets, view in chunks.chunks.items():
            box = tuple(slice(at, at + size) for at, size in zip(offsets, view.shape))
            np.testing.assert_array_equal(view.numpy(), whole[box])
            view.fill_(-1)
        assert (flat == -1).all() and sum(view.numel() for view in chunks.chunks.values()) == stop - start


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4, 2)])
def test_a_range_is_few_boxes(shape):
    size = math.prod(shape)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            boxes = [*dcp_pieces.range_boxes(shape, start, stop)]
            indices = np.arange(size).reshape(shape)
            order = [int(n) for box in boxes for n in np.ravel(indices[np.ix_(*box)] if shape else indices)]
            assert order == [*range(start, stop)] and len(boxes) <= max(2 * len(shape), 1)
