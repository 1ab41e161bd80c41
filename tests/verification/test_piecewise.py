"""Arithmetic in pieces, beside the same on whole arrays."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.verification.piecewise import _POOL, PIECE, dot, normal, pieces


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (PIECE,), (2, PIECE + 1)])
def test_pieces_give_what_whole_arrays_do(shape: tuple[int, ...]):
    random = np.random.default_rng(1)
    one, other = random.standard_normal(shape, np.float32), random.standard_normal(shape)
    assert sum(first.size for first, _ in pieces(one, other)) == one.size
    assert dot(one, other) == pytest.approx(float((one.astype(np.float64) * other).sum()), rel=1e-12)


def test_turned_arrays_are_read_in_their_own_order():
    array = np.arange(12.0).reshape(3, 4)
    assert dot(array.T, array.T) == float((array**2).sum())
    assert dot(array.T, np.ones((4, 3))) == array.sum()


@pytest.mark.parametrize("count", [0, 1, PIECE + 3, _POOL + 5])
def test_normal_numbers_are_as_many_as_asked_for(count: int):
    found = list(normal(np.random.default_rng(3), count, np.float32))
    assert sum(each.size for each in found) == count and all(each.size <= PIECE for each in found)
    if 1 < count <= _POOL:
        assert np.array_equal(np.concatenate(found), np.random.default_rng(3).standard_normal(count, np.float32))
    if count > _POOL:
        assert abs(np.concatenate(found).std() - 1) < 0.02
