"""Pieces are cut out of tensors and put back: ranges, boxes, and every step-th row."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.artifact.pieces import Piece, cover, cut, place_shape, put

WHOLE = np.arange(35, dtype="f4").reshape(7, 5)
COLUMNS = ((0, 7), (0, 1, 3, 5))
REST = ((0, 7), (1, 3))


def parts(*pieces: tuple[int, int, object, object]) -> list[Piece]:
    return [Piece("w", *piece) for piece in pieces]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pieces",
    [
        parts((0, 12, None, None), (12, 35, None, None)),
        parts((0, 21, COLUMNS, None), (0, 14, REST, None)),
        parts((0, 15, None, (0, 3)), (0, 10, None, (1, 3)), (0, 10, None, (2, 3))),
        parts((0, 7, None, (0, 2)), (7, 20, None, (0, 2)), (0, 15, None, (1, 2))),
        parts((0, 12, COLUMNS, (0, 2)), (0, 9, COLUMNS, (1, 2)), (0, 8, REST, (0, 2)), (0, 6, REST, (1, 2))),
    ],
)
def test_pieces_that_tile_a_tensor_put_it_together(pieces: list[Piece]) -> None:
    made = np.full_like(WHOLE, -1)
    for piece in pieces:
        flat = cut(piece, WHOLE)
        assert flat.shape == (piece.elements,)
        put(made, piece.place, flat.copy(), piece.start)
    np.testing.assert_array_equal(made, WHOLE)


def test_rows_are_counted_from_the_first_on() -> None:
    np.testing.assert_array_equal(cut(Piece("w", 0, 10, None, (2, 3)), WHOLE), [*range(10, 15), *range(25, 30)])
    np.testing.assert_array_equal(cut(Piece("w", 5, 7, None, (2, 3)), WHOLE), [25, 26])


def test_a_part_of_more_parts_than_rows_is_empty() -> None:
    piece = Piece("w", 0, 0, None, (8, 9))
    assert place_shape(piece.place, WHOLE.shape) == (0, 5) and cut(piece, WHOLE).size == 0


@pytest.mark.parametrize(
    ("pieces", "covers"),
    [
        ([Piece("t", 0, 8)], True),
        ([Piece("t", 4, 8), Piece("t", 0, 4)], True),
        ([Piece("t", 0, 5), Piece("t", 3, 6)], False),
        ([Piece("t", 0, 3), Piece("t", 5, 8), Piece("t", 1, 3)], False),
        ([Piece("t", 0, 4, ((0, 2), (0, 2))), Piece("t", 0, 4, ((0, 2), (2, 4)))], True),
        ([Piece("t", 0, 4, ((0, 2), (0, 2))), Piece("t", 0, 3, ((0, 2), (2, 4)))], False),
        ([Piece("t", 0, 6, ((0, 2), (0, 3))), Piece("t", 0, 4, ((0, 2), (2, 4)))], False),
        ([Piece("t", 0, 8, None, (0, 1))], True),
        ([Piece("t", 0, 4, None, (0, 2))], False),
        ([Piece("t", 0, 4, None, (1, 2)), Piece("t", 0, 4, None, (0, 2))], True),
        ([Piece("t", 0, 4, None, (1, 2)), Piece("t", 0, 3, None, (0, 2))], False),
        ([], False),
    ],
)
def test_pieces_that_overlap_may_leave_gaps(pieces: list[Piece], covers: bool) -> None:
    assert cover(pieces, (2, 4)) == covers
