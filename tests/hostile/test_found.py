"""What the fuzzer found, made small."""

from __future__ import annotations

from gopt.offline.optimizer.formulas import roots


def test_a_quotient_that_is_zero_has_no_root():
    assert roots(bare=1.0, full=0.0, least=0.0) == []
