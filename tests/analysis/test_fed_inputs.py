"""Inputs that are fed beside stored states are no states."""

from __future__ import annotations

import pytest
from small_graphs import chain

from gopt.analysis.fed_inputs import without_fed


def graph(*stored: str):
    made = chain("wn", outputs=["n"])
    made.initializers.update(dict.fromkeys(stored))
    return made


@pytest.mark.parametrize(
    ("reach", "stored", "left"),
    [
        ({"w2": {"w": 2, "noise": 1}}, "w", {"w2": {"w": 2}}),
        ({"w2": {"w": 2, "m": 1}, "m2": {"m": 1}}, "w", None),  # a state without a stored value: two outputs read it
        ({"w2": {"w": 2}, "e2": {"e": 1, "w": 1}}, "w", None),  # the average would be left without a state
        ({"w2": {"w": 2, "noise": 1}}, "", None),
    ],
)
def test_what_is_fed_beside_a_stored_state_is_left_out(reach, stored, left):
    assert without_fed(graph(*stored), reach) == (reach if left is None else left)
