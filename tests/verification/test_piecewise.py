"""Arithmetic in pieces, beside the same on whole arrays."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.verification.piecewise import PIECE, add_multiple, dot, pieces


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (PIECE,), (2, PIECE + 1)])
def test_pieces_give_what_whole_arrays_do(shape: tuple[int, ...]):
    random = np.random.default_rng(1)
    one, other = random.standard_normal(shape, np.float32), random.standard_normal(shape)
    assert sum(first.size for first, _ in pieces(one, other)) == one.size
    assert dot(one, other) == pytest.approx(float((one.astype(np.float64) * other).sum()), rel=1e-12)
    wanted = one + 0.25 * other
    target = np.array(one)
    add_multiple(target, other, 0.25)
    np.testing.assert_allclose(target, wanted, rtol=1e-6, atol=1e-6)


def test_turned_arrays_are_read_in_their_own_order():
    array = np.arange(12.0).reshape(3, 4)
    assert dot(array.T, array.T) == float((array**2).sum())
    assert dot(array.T, np.ones((4, 3))) == array.sum()
