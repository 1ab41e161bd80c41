"""Pauses of a wait: they give the processor away first, then sleep, and hold the lock again afterwards."""

import time
from types import SimpleNamespace

import pytest

from gopt.runtime.messages.pauses import LAST_SLEEP, Pauses


class Lock:
    """A condition that notes how long it is slept on, and how it is released."""

    def __init__(self):
        self.sleeps, self.calls = [], []
        self.wait = self.sleeps.append

    def acquire(self):
        self.calls.append("acquire")

    def release(self):
        self.calls.append("release")


@pytest.fixture
def wait(monkeypatch):
    """A wait whose clock the test sets: ``after(seconds)`` pauses once when nothing has happened for so long."""
    lock, now = Lock(), [50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pauses = Pauses(lock)
    pauses.pause(1, 1.0, False)
    lock.calls.clear()

    def after(seconds, left=1.0, busy=False):
        now[0] = 50.0 + seconds
        pauses.pause(2, left, busy)

    return SimpleNamespace(after=after, lock=lock)


def test_a_wait_gives_the_processor_away_first(wait):
    wait.after(1e-4)
    assert wait.lock.calls == ["release", "acquire"]
    assert wait.lock.sleeps == []


def test_then_it_sleeps_longer_each_time_up_to_a_limit(wait):
    for seconds in (4e-4, 1e-3, 1.0):
        wait.after(seconds)
    first, second, last = wait.lock.sleeps
    assert first < second < last == LAST_SLEEP


def test_it_sleeps_no_longer_than_the_wait_lasts(wait):
    wait.after(1.0, left=1e-5)
    assert wait.lock.sleeps == [1e-5]


def test_while_arrays_travel_it_yields_longer(wait):
    wait.after(1e-3, busy=True)
    assert wait.lock.sleeps == []
