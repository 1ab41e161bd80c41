"""What takes too long ends the job, and is named."""

from __future__ import annotations

import threading

import pytest

from gopt.runtime.watch import Watch


@pytest.mark.parametrize("what", ["call 3", lambda: "call 3"])
def test_a_wait_that_is_too_long_is_named(what):
    said: list[str] = []
    ended = threading.Event()
    watch = Watch(0.1, said.append, ended.set)
    with watch.on(what):
        assert ended.wait(10)
    assert said[0] == "after 0.1 s, it still waits at call 3: another rank did not come"


def test_a_wait_that_ended_is_forgotten():
    ended = threading.Event()
    watch = Watch(0.1, lambda text: None, ended.set)
    for _ in range(3):
        with watch.on("call 3"):
            pass
    assert not ended.wait(0.5)
