"""Pieces of a tensor: the classic rule by its worked table, balanced rows, and what holds of any shape."""

from __future__ import annotations

import math
import random
import secrets
from itertools import pairwise

import pytest

from gopt.errors import InvariantError, OptionError, UnsupportedError
from gopt.parameter_server.slicing import Slicing, piece_shape, pieces, static_shape

TABLE = [
    ([3, 5], 10, 1024, [15], [3]),
    ([1024], 10, 1024, [1024], None),
    ([28, 784], 10, 1024, [2352] * 9 + [784], [3] * 9 + [1]),
    ([8, 1020], 10, 1024, [2040] * 4, [2] * 4),
    ([800, 10], 10, 1024, [1150] * 6 + [1100], [115] * 6 + [110]),
    ([28, 784], 10, 8192, [10976] * 2, [14] * 2),
    ([8, 1020], 10, 8192, [8160], [8]),
    ([800, 10], 10, 8192, [8000], [800]),
    ([6, 33, 33, 33], 10, 8192, [35937] * 6, [1] * 6),
    ([1000, 1000], 2, 8192, [500000] * 2, [500] * 2),
    ([1000, 1000], 3, 8192, [334000, 334000, 332000], [334, 334, 332]),
    ([1000, 1000], 2, 1048576, [1000000], [1000]),
    ([1000], 2, 8192, [1000], None),
    ([8191], 4, 8192, [8191], None),
    ([8192], 4, 8192, [8192], None),
    ([16383], 4, 8192, [16383], None),
    ([16384], 4, 8192, [8192] * 2, None),
    ([16385], 2, 8192, [8193, 8192], None),
    ([1, 1000000], 4, 8192, [1000000], [1]),
    ([3, 1000000], 4, 8192, [1000000] * 3, [1] * 3),
    ([5, 10000], 4, 8192, [20000, 20000, 10000], [2, 2, 1]),
    ([7, 8192], 4, 8192, [16384] * 3 + [8192], [2, 2, 2, 1]),
    ([128, 64], 2, 8192, [8192], [128]),
    ([256, 64], 2, 8192, [8192] * 2, [128] * 2),
    ([10], 4, 1, [3, 3, 3, 1], None),
    ([10, 1], 4, 1, [3, 3, 3, 1], [3, 3, 3, 1]),
    ([5], 4, 1, [2, 2, 1], None),
    ([30522, 768], 8, 8192, [2930688] * 7 + [2926080], [3816] * 7 + [3810]),
    ([50257, 768], 16, 8192, [2413056] * 15 + [2401536], [3142] * 15 + [3127]),
]
"""Shape, servers, minimum -> elements of the pieces, and their rows where there are rows (the sheet's B1.5)."""


def sizes(cut):
    return [stop - start for start, stop in cut]


@pytest.mark.parametrize("shape, servers, minimum, elements, rows", TABLE)
def test_the_classic_rule_by_its_worked_table(shape, servers, minimum, elements, rows):
    cut = pieces(shape, Slicing.CLASSIC, servers, minimum)
    assert sizes(cut) == elements
    if rows is not None:
        shapes = [piece_shape(shape, *piece) for piece in cut]
        assert shapes == [(count, *shape[1:]) for count in rows]


@pytest.mark.parametrize(
    "shape, servers, minimum, wanted",
    [
        ((5,), 4, 1, [2, 1, 1, 1]),
        ((5, 10000), 4, 8192, [20000, 10000, 10000, 10000]),
        ((7, 8192), 4, 8192, [16384, 16384, 16384, 8192]),
        ((1000, 1000), 3, 8192, [334000, 333000, 333000]),
        ((1, 1000000), 4, 8192, [1000000]),
        ((2, 3), 4, 1, [3, 3]),
        ((16384,), 4, 8192, [8192, 8192]),
        ((10,), 4, 11, [10]),
    ],
)
def test_balanced_pieces_are_as_equal_as_rows_allow(shape, servers, minimum, wanted):
    assert sizes(pieces(shape, Slicing.BALANCED, servers, minimum)) == wanted


@pytest.mark.parametrize("slicing", Slicing)
@pytest.mark.parametrize("shape, elements", [((), 1), ((0,), 0), ((0, 3), 0), ((4, 0), 0), ((1,), 1), ((1, 1), 1)])
def test_scalars_and_empty_tensors_are_one_piece(slicing, shape, elements):
    assert pieces(shape, slicing, 4, 1) == ((0, elements),)
    assert piece_shape(shape, 0, elements) == shape


def test_without_slicing_a_tensor_is_one_piece():
    assert pieces((1000, 1000), Slicing.OFF, 8, 1) == ((0, 1000000),)


@pytest.mark.parametrize("shape, servers, minimum", [((4, 4), 0, 1), ((4, 4), 1, 0), ((4, 4), -2, 1), ((), 1, -5)])
@pytest.mark.parametrize("slicing", Slicing)
def test_counts_below_one_are_refused(slicing, shape, servers, minimum):
    with pytest.raises(OptionError, match=r"cannot be (0|-2|-5)"):
        pieces(shape, slicing, servers, minimum)


def test_shapes_of_pieces():
    assert piece_shape((6, 4), 8, 16) == (2, 4)
    assert piece_shape((6, 4, 2), 8, 16) == (1, 4, 2)
    assert piece_shape((6, 4), 2, 16) == piece_shape((6, 4), 0, 14) == piece_shape((20,), 3, 17) == (14,)
    assert piece_shape((6, 4), 8, 8) == (0, 4)
    assert piece_shape((1, 4), 0, 4) == (1, 4)
    for start, stop in ((-1, 2), (3, 2), (0, 25)):
        with pytest.raises(InvariantError):
            piece_shape((6, 4), start, stop)


def test_a_dimension_that_is_not_fixed_is_named():
    assert static_shape("W", (3, 0)) == (3, 0)
    assert static_shape("s", ()) == ()
    for shape, said in (((3, "N"), "dimension N "), ((None, 3), "dimension None "), ((-1, 3), "dimension -1 ")):
        with pytest.raises(UnsupportedError, match=f"'W'.*{said}is not fixed"):
            static_shape("W", shape)
    with pytest.raises(UnsupportedError, match=r"'W'.*shape is not known"):
        static_shape("W", None)


def test_what_holds_of_pieces_of_any_shape():
    seed = secrets.randbits(32)
    r = random.Random(seed)
    for _ in range(300):
        shape = tuple(r.choice([1, 2, 3, 7, r.randint(0, 200)]) for _ in range(r.randint(0, 4)))
        servers, minimum = r.randint(1, 12), r.choice([1, 2, 17, 1024, r.randint(1, 50000)])
        elements, row = math.prod(shape), math.prod(shape[1:]) if len(shape) > 1 else 1
        wanted = max(1, min(servers, elements // minimum))
        for slicing in Slicing:
            case = (seed, shape, slicing, servers, minimum)
            cut = pieces(shape, slicing, servers, minimum)
            assert cut[0][0] == 0 and cut[-1][1] == elements, case
            assert all(before[1] == after[0] for before, after in pairwise(cut)), case
            assert 1 <= len(cut) <= wanted <= servers, case
            assert not elements or min(sizes(cut)) > 0, case
            assert not elements or all(start % row == stop % row == 0 for start, stop in cut), case
            assert all(math.prod(piece_shape(shape, *piece)) == size for piece, size in zip(cut, sizes(cut))), case
            if slicing is Slicing.CLASSIC:
                assert len(set(sizes(cut)[:-1])) <= 1 and sizes(cut)[-1] <= sizes(cut)[0], case
            if slicing is Slicing.BALANCED and elements:
                assert max(sizes(cut)) - min(sizes(cut)) in (0, row), case
                assert len(cut) == min(wanted, elements // row), case
