"""Garbage collection is off inside of a block, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gopt.system.garbage import gc_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_it_was_afterwards(before):
    (gc.enable if before else gc.disable)()
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled() is before


def test_an_inner_block_ends_nothing_for_the_outer_one():
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()


def test_an_error_does_not_leave_it_off():
    with pytest.raises(ZeroDivisionError), gc_paused():
        raise ZeroDivisionError
    assert gc.isenabled()
