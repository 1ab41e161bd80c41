"""What the fuzzer found, made small."""

from __future__ import annotations

import numpy as np

from gopt.offline.optimizer.formulas import find_root


class Nothing:
    """A probe that no root explains."""

    def explains(self, made: object, place: int) -> bool:
        return False


def test_a_quotient_that_is_zero_has_no_root():
    assert find_root(Nothing(), 1.0, 0.0, lambda root: np.zeros(1)) is None
