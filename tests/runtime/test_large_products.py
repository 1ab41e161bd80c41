"""Products of float64 with large float32 matrices, in pieces."""

from __future__ import annotations

import numpy as np
import pytest

from gopt.runtime import large_products
from gopt.runtime.large_products import gemm, matmul


@pytest.mark.parametrize("wide", [0, 1, 2])
@pytest.mark.parametrize("dims", [(3, 40, 50), (40, 3, 50), (50, 40, 3), (1, 64, 1)])
def test_products_in_pieces_are_products(dims: tuple[int, int, int], wide: int, monkeypatch: pytest.MonkeyPatch):
    """``wide``: the operand that is float64, or both; then the result is float32."""
    monkeypatch.setattr(large_products, "_PIECE", 100)
    m, k, n = dims
    random = np.random.default_rng(0)
    a, b, c = (random.standard_normal(each).astype(np.float32) for each in ((m, k), (k, n), (n,)))
    a, b = (each.astype(np.float64) if wide in (place, 2) else each for place, each in enumerate((a, b)))
    due = a.astype(np.float64) @ b.astype(np.float64)
    limit = 1e-6 if wide == 2 else 1e-13
    for turned in range(4):
        first, second = a.T.copy() if turned % 2 else a, b.T.copy() if turned // 2 else b
        found = gemm(first, second, c, alpha=0.5, beta=2.0, transA=turned % 2, transB=turned // 2)
        np.testing.assert_allclose(found, 0.5 * due + 2 * c.astype(np.float64), rtol=limit, atol=limit * k)
    np.testing.assert_allclose(matmul(a, b), due, rtol=limit, atol=limit * k)
    assert matmul(a, b).dtype == (np.float32 if wide == 2 else np.float64)
