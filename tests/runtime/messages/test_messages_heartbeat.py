"""Signs of life, on a communicator whose messages and clock the test holds."""

import time
from types import SimpleNamespace

import pytest

from gopt.runtime.messages.heartbeat import Heartbeat
from gopt.runtime.messages.roster import Settings

TAG = 7


class Wire:
    """What processes have sent each other; one side of it looks like a communicator of MPI."""

    def __init__(self):
        self.waiting = {}
        self.broken = set()

    def side(self, own):
        def probe(source, tag, status):
            if not self.waiting.get((own, tag)):
                return None
            status.source, request = self.waiting[own, tag].pop(0)
            return SimpleNamespace(Recv=lambda buffer: request.append("taken"))

        def send(data, process, tag):
            if process in self.broken:
                raise OSError("gone")
            request = []
            self.waiting.setdefault((process, tag), []).append((own, request))
            return SimpleNamespace(Test=lambda: bool(request))

        return SimpleNamespace(Improbe=probe, Issend=send)


class Status:
    source = -1

    def Get_source(self):
        return self.source


MPI = SimpleNamespace(ANY_SOURCE=-1, BYTE="byte", Status=Status, Exception=OSError)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def beats(wire, own, processes=3, every=1.0, timeout=5.0):
    settings = Settings(heartbeat=every, heartbeat_timeout=timeout)
    return Heartbeat(MPI, wire.side(own), processes, own, TAG, settings)


def nobody(process):
    return False


def test_a_process_that_sends_signs_is_never_silent(clock):
    wire = Wire()
    first, second = beats(wire, 0, 2), beats(wire, 1, 2)
    for _ in range(20):
        clock[0] += 1
        assert first.beat(nobody) == []
        assert second.beat(nobody) == []
    assert first.seconds_silent(1) <= 1


def test_a_process_that_sends_none_is_silent_after_the_timeout(clock):
    first = beats(Wire(), 0)
    silent = []
    for _ in range(6):
        clock[0] += 1
        first.heard(2)
        silent.append(first.beat(nobody))
    assert silent == [[], [], [], [], [], [1]]
    assert first.seconds_silent(1) == 6


def test_a_sign_is_sent_when_the_last_one_was_taken(clock):
    wire = Wire()
    first, second = beats(wire, 0, 2), beats(wire, 1, 2)
    for _ in range(3):
        clock[0] += 1
        first.beat(nobody)
    assert len(wire.waiting[1, TAG]) == 1
    second.beat(nobody)
    clock[0] += 0.5
    first.beat(nobody)
    assert wire.waiting[1, TAG] == []  # it is not yet time
    clock[0] += 0.5
    first.beat(nobody)
    assert len(wire.waiting[1, TAG]) == 1


def test_a_process_that_stood_still_itself_blames_no_other(clock):
    first = beats(Wire(), 0, 2)
    clock[0] += 1
    first.beat(nobody)
    clock[0] += 60
    assert first.beat(nobody) == []
    assert first.seconds_silent(1) == 0


def test_nothing_is_sent_to_a_process_that_is_gone(clock):
    wire = Wire()
    first = beats(wire, 0)
    clock[0] += 6
    assert first.beat(lambda process: process == 1) == [2]
    assert (1, TAG) not in wire.waiting


def test_a_send_that_mpi_refuses_is_left_to_the_timeout(clock):
    wire = Wire()
    wire.broken = {1}
    first = beats(wire, 0, 2)
    clock[0] += 1
    assert first.beat(nobody) == []


def test_no_heartbeat_means_no_signs_and_no_silence(clock):
    wire = Wire()
    first = beats(wire, 0, every=0)
    clock[0] += 1000
    assert first.beat(nobody) == []
    assert not wire.waiting
