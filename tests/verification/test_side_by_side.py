"""Runs side by side: on threads, in order, and as the calling thread would."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gopt.verification import side_by_side as module
from gopt.verification.side_by_side import ABREAST, side_by_side


@pytest.fixture
def cores(monkeypatch):
    """A machine of some number of cores."""
    return lambda count: monkeypatch.setattr(module, "usable_cores", lambda: count)


def test_runs_stand_side_by_side_and_results_in_order(cores):
    cores(8)
    meeting = threading.Barrier(ABREAST)

    def work(item):
        meeting.wait(30)  # fails where one waits for the other's end
        return item, threading.current_thread()

    found = side_by_side(work, range(2 * ABREAST))
    assert [item for item, _ in found] == list(range(2 * ABREAST))
    assert len({thread for _, thread in found}) == ABREAST


@pytest.mark.parametrize(("count", "abreast", "items"), [(1, 2, 3), (8, 1, 3), (8, 2, 1), (8, 2, 0)])
def test_what_has_nothing_beside_it_runs_in_the_calling_thread(cores, count, abreast, items):
    cores(count)
    here = threading.current_thread()
    assert side_by_side(lambda item: threading.current_thread(), range(items), abreast) == [here] * items


def test_the_first_failure_is_raised_once_all_have_ended(cores):
    cores(2)
    ended = []

    def work(item):
        ended.append(item)
        if item:
            raise ValueError(item)

    with pytest.raises(ValueError, match=r"^1$"):
        side_by_side(work, range(4))
    assert sorted(ended) == list(range(4))


def test_what_numpy_says_of_overflows_is_as_outside(cores):
    cores(2)
    with np.errstate(over="raise"):
        assert side_by_side(lambda item: np.geterr()["over"], range(2)) == ["raise"] * 2
