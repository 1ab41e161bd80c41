"""Memory is handed out again when, and only when, nobody can see it any more."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from gopt.runtime.host_value import address_of, array_of, runtime_value
from gopt.runtime.memory import Pool, give_back

FLOAT = np.dtype(np.float32)


def test_what_nobody_sees_is_used_again():
    pool = Pool()
    first = address_of(pool.take((3, 4), FLOAT))
    again = pool.take((12,), np.dtype(np.int32))
    assert address_of(again) == first and again.shape == (12,) and again.dtype == np.int32


def test_a_view_of_a_view_keeps_the_memory():
    pool = Pool()
    view = pool.take((3, 4), FLOAT)[1:].reshape(-1)[2:]
    assert not np.shares_memory(pool.take((3, 4), FLOAT), view)


def test_a_runtime_value_and_a_look_into_it_keep_the_memory():
    pool = Pool()
    value = runtime_value(pool.take((3, 4), FLOAT))
    assert not np.shares_memory(pool.take((3, 4), FLOAT), array_of(value))
    look = array_of(value)
    del value
    other = pool.take((3, 4), FLOAT)
    assert not np.shares_memory(other, look)
    place = address_of(look)
    del look
    kept = [pool.take((3, 4), FLOAT) for _ in range(2)]
    assert place in {address_of(each) for each in kept}


def test_sizes_do_not_mix():
    pool = Pool()
    small = address_of(pool.take((3,), FLOAT))
    assert pool.take((0, 5), FLOAT).shape == (0, 5)
    assert address_of(pool.take((3,), FLOAT)) == small


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is another")
def test_what_was_freed_between_values_that_live_goes_back():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) << 12

    made = [np.ones(1 << 16, np.uint8) for _ in range(2048)]
    left = made[::64]  # a large value fits nowhere between them
    del made
    before = resident()
    give_back()
    assert before - resident() > 100 << 20
    assert all(each.all() for each in left)
