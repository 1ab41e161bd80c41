"""Errors of waits: a stopped process is the one that is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from gopt.runtime.engines.rank_status import RUNNING, RankStatus
from gopt.runtime.messages import failures
from gopt.runtime.messages.failures import Awaited, late
from gopt.runtime.messages.roster import Roster

ROSTER = Roster.of(["trainer 0", "trainer 1", "server 0"])


@pytest.fixture
def halted(monkeypatch):
    """The processes that are stopped."""
    found: set[int] = set()
    status = [RankStatus(rank, 100 + rank, 0, -1, RUNNING, 0.0) for rank in range(3)]
    monkeypatch.setattr(failures, "launcher_folder", lambda: Path())
    monkeypatch.setattr(failures, "read", lambda _: status)
    monkeypatch.setattr(failures, "is_stopped", lambda process: process - 100 in found)
    return found


def test_of_those_that_are_awaited_the_stopped_one_alone(halted):
    halted.add(0)
    text = late(ROSTER, 2, Awaited((0, 1), "push"), 4).message
    assert "still waits for trainer 0 (endpoint 0, process 0) to push; the process of trainer 0" in text
    assert "trainer 1" not in text


def test_a_stopped_one_that_others_wait_for(halted):
    halted.add(2)
    text = late(ROSTER, 0, Awaited((1,), "end step 2"), 4).message
    assert text.endswith("to end step 2; the process of server 0 (endpoint 2, process 2) is stopped")


def test_none_is_stopped(halted):
    assert late(ROSTER, 0, Awaited((1,), "end step 2"), 4).message.endswith("to end step 2")
