"""Orders of delivery on threads: by a seed, and as recorded."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from seeded_order import Seeded

from gopt.errors import RunError
from gopt.runtime.messages.failures import LateError
from gopt.runtime.messages.message import Kind
from gopt.runtime.messages.order import Arrival, Recorded
from gopt.runtime.messages.roster import Roster, Settings
from gopt.runtime.messages.threads import ThreadHub, run_threads

NAMES = ["trainer 0", "trainer 1", "trainer 2", "server 0"]
ROUNDS = 8


def train(endpoint):
    """Trainers push and pull; the server's value depends on the order of all pushes."""
    if endpoint.number < 3:
        seen = []
        for number in range(ROUNDS):
            endpoint.isend(3, endpoint.message(Kind.PUSH, 0, number, [np.float32([endpoint.number + number / 10])]))
            endpoint.send(3, endpoint.message(Kind.PULL, 0, number))
            seen.append(float(endpoint.receive().arrays[0][0]))
        endpoint.close()
        return seen, endpoint.arrivals
    value = np.zeros(1, np.float32)
    for _ in range(3 * 2 * ROUNDS):
        message = endpoint.receive()
        if message.kind is Kind.PUSH:
            value = value * np.float32(0.7) + message.arrays[0]
        else:
            endpoint.isend(message.source, endpoint.message(Kind.VALUES, 0, message.round, [value]))
    endpoint.close()
    return float(value[0]), endpoint.arrivals


def run(order=None, work=train):
    return run_threads(ThreadHub(Roster.of(NAMES), Settings(messages=3), order), work)


def test_a_seed_gives_the_same_run():
    runs = [run(Seeded(seed)) for seed in (1, 1, 2, 2, 3)]
    assert runs[0] == runs[1] and runs[2] == runs[3]
    assert len({each[3][0] for each in runs}) == 3


@pytest.mark.parametrize("order", [None, Seeded(5)])
def test_a_recorded_run_is_repeated(order):
    first = run(order)
    record = {number: [Arrival.from_json(each.to_json()) for each in found[1]] for number, found in enumerate(first)}
    assert run(Recorded(record)) == first


def test_a_record_that_does_not_fit_is_refused():
    wrong = Arrival(0, Kind.PUSH, 9, 0)
    said = (
        r"server 0: the record does not fit: endpoint 3 received PUSH of key 9 .*, now it is PUSH of key 0 in round 0"
    )
    with pytest.raises(RunError, match=said):
        run(Recorded({3: [wrong]}))


def test_behind_the_record_messages_come_as_they_come():
    record = run()[3][1]
    assert run(Recorded({3: record[:5]}))[3][1][:5] == record[:5]


def test_time_is_virtual(monkeypatch):
    """Where none can go on, the wait that would end first is over at once, and always the same one. The machine's clock
    leaps between any two readings: a wait that looked at it would end too early."""
    leaps = itertools.count(step=20_000)
    monkeypatch.setattr("gopt.runtime.messages.hub.time", SimpleNamespace(monotonic=lambda: next(leaps)))

    def work(endpoint):
        if endpoint.number in (1, 2):
            with pytest.raises(LateError, match=f"after {1000 * endpoint.number} s, trainer {endpoint.number}"):
                endpoint.receive(1000.0 * endpoint.number)
            endpoint.send(0, endpoint.message(Kind.BYE))
            return None
        return [endpoint.receive(10_000.0).source for _ in range(2)] if endpoint.number == 0 else None

    for seed in range(5):
        assert run(Seeded(seed), work)[0] == [1, 2]
