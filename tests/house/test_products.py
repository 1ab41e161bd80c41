"""What runs of a product each time: every pair of values, and the rest is not lost."""

from __future__ import annotations

import itertools

import pytest
from products import kept_rows, spread


@pytest.mark.parametrize("sizes", [(18, 4, 4), (13, 4, 3), (6, 4, 3), (4, 3, 2, 2)])
def test_every_pair_meets(sizes):
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    kept = kept_rows(spread(*axes))
    assert len(kept) == len(list(itertools.product(*axes[:-1])))
    for first, second in itertools.combinations(range(len(sizes)), 2):
        met = {(row[first], row[second]) for row in kept}
        assert met == set(itertools.product(axes[first], axes[second]))


def test_the_rest_is_slow_and_nothing_is_lost():
    rows = spread("abc", "xy", keep=1)
    assert [tuple(row.values) for row in rows] == list(itertools.product("abc", "xy"))
    assert [row.marks for row in rows if not row.marks] + [row.marks for row in rows if row.marks] == [
        *[()] * 3, *[(pytest.mark.slow,)] * 3,
    ]  # fmt: skip
    assert len(kept_rows(spread(range(8), range(8), keep=3))) == 24
