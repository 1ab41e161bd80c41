"""A message counts once at most."""

from __future__ import annotations

import numpy as np

from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.parameter_server.contributions import Contributions


def push(source: int, round_number: int, bucket: int, value: float) -> Message:
    return Message(Kind.PUSH, source, bucket, round_number, (np.full(2, value, np.float32),), None)


def test_a_second_message_of_a_trainer_round_and_bucket_is_dropped_and_counted() -> None:
    found = Contributions(3)
    assert found.add(push(0, 3, 1, 1.0)) and found.add(push(1, 3, 1, 2.0)) and found.add(push(0, 3, 2, 3.0))
    assert not found.add(push(0, 3, 1, 9.0))
    assert found.dropped == 1 and found.of(1)[0].values[0] == 1.0


def test_a_message_to_a_round_that_is_over_is_dropped() -> None:
    found = Contributions(3)
    found.next_round()
    assert not found.add(push(0, 3, 1, 1.0))
    assert found.dropped == 1 and not found.any() and not found.sources() and not found.of(1)


def test_a_message_to_the_next_round_waits() -> None:
    found = Contributions(3)
    assert found.add(push(0, 4, 1, 5.0)) and not found.any()
    found.next_round()
    assert found.of(1)[0].values[0] == 5.0
