"""How a dimension is shared out: every rule, for all small lengths and members."""

from __future__ import annotations

import pytest

from gopt.tensor_parallel.sizes import Sizes, part_sizes


@pytest.mark.parametrize("rule", Sizes)
@pytest.mark.parametrize("unit", [1, 3, 8])
def test_all_of_it_is_shared_out_in_whole_units(rule, unit):
    for length in range(40):
        for members in range(1, 9):
            sizes = part_sizes(length, members, rule, unit)
            assert sum(sizes) == length
            assert len(sizes) == members
            assert min(sizes) >= 0
            assert sum(size % unit > 0 for size in sizes) <= 1, "the rest stays together"


@pytest.mark.parametrize(("rule", "length", "members", "sizes"), [
    (Sizes.BALANCED, 10, 4, (3, 3, 2, 2)), (Sizes.CEIL, 10, 4, (3, 3, 3, 1)), (Sizes.FLOOR_LAST, 10, 4, (2, 2, 2, 4)),
    (Sizes.BALANCED, 21, 8, (3, 3, 3, 3, 3, 2, 2, 2)), (Sizes.CEIL, 21, 8, (3,) * 7 + (0,)),
    (Sizes.FLOOR_LAST, 21, 8, (2,) * 7 + (7,)), (Sizes.BALANCED, 33, 2, (17, 16)), (Sizes.CEIL, 65, 3, (22, 22, 21)),
    (Sizes.BALANCED, 2, 4, (1, 1, 0, 0)), (Sizes.CEIL, 2, 4, (1, 1, 0, 0)), (Sizes.FLOOR_LAST, 2, 4, (0, 0, 0, 2)),
])  # fmt: skip
def test_sizes_by_rule(rule, length, members, sizes):
    assert part_sizes(length, members, rule) == sizes


def test_balanced_sizes_differ_by_one():
    for length in range(65):
        for members in range(1, 9):
            sizes = part_sizes(length, members, Sizes.BALANCED)
            assert max(sizes) - min(sizes) <= 1


def test_heads_stay_whole():
    assert part_sizes(24, 2, Sizes.BALANCED, 8) == (16, 8)
    assert part_sizes(20, 2, Sizes.BALANCED, 8) == (8, 12), "the rest goes to the last that has some"
    assert part_sizes(5, 3, Sizes.BALANCED, 8) == (5, 0, 0)
