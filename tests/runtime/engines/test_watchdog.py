"""What takes too long ends the job, and is named."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace

import pytest

from gopt.runtime.engines import watchdog as module
from gopt.runtime.engines.watchdog import Watchdog

LONG = 600.0
"""Seconds that nothing takes, on however busy a machine."""


@pytest.mark.parametrize("what", ["call 3", lambda: "call 3"])
def test_a_wait_that_is_too_long_is_named(what):
    said: list[str] = []
    ended = threading.Event()
    watchdog = Watchdog(0.1, said.append, ended.set)
    with watchdog.on(what):
        assert ended.wait(LONG)
    assert said[0] == "after 0.1 s, it still waits at call 3: another rank did not reach this call"


def test_a_wait_that_ended_is_forgotten(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    ended: list[str] = []
    watchdog = Watchdog(LONG, lambda text: None, lambda: ended.append("ended"))
    for _ in range(3):
        with watchdog.on("call 3"):
            now += LONG - 1
            watchdog._check_deadline()
        now += LONG
        watchdog._check_deadline()
    assert not ended
    with watchdog.on("call 3"):
        now += LONG + 1
        watchdog._check_deadline()
    assert ended


@pytest.mark.parametrize("way", ["closed", "dropped", "dropped in a ring"])
def test_its_thread_ends_with_it(way):
    before = set(threading.enumerate())
    watches = [Watchdog(0.1, print, lambda: None) for _ in range(20)]
    mine = set(threading.enumerate()) - before
    assert len(mine) == 20
    for watchdog in watches:
        if way == "closed":
            watchdog.close()
        elif way == "dropped in a ring":
            watchdog.ring = watchdog
    if way != "closed":
        del watches, watchdog
        gc.collect()
    end = time.monotonic() + LONG
    while any(thread.is_alive() for thread in mine) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in mine)
