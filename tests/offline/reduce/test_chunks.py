"""Halving: everything that can go goes, with few attempts."""

from __future__ import annotations

import pytest

from gopt.offline.reduce.chunks import remove_chunks


def left_of(count: int, needed: set[int]) -> tuple[list[int], int]:
    left, attempts = list(range(count)), 0

    def attempt(chunk):
        nonlocal attempts
        attempts += 1
        if needed & set(chunk):
            return False
        left[:] = [each for each in left if each not in set(chunk)]
        return True

    remove_chunks(list(left), attempt, lambda each: each in left)
    return left, attempts


@pytest.mark.parametrize("needed", [set(), {0}, {99}, {50}, {0, 99}, {3, 4, 70}])
def test_only_what_is_needed_is_left(needed):
    left, attempts = left_of(100, needed)
    assert left == sorted(needed)
    assert attempts <= 1 + 16 * len(needed)


def test_nothing_can_go():
    left, attempts = left_of(16, set(range(16)))
    assert len(left) == 16 and attempts == 31
