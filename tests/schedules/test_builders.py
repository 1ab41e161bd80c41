"""Known schedules: all sizes run, and orders are those of their definitions."""

from __future__ import annotations

import pytest

from gopt.errors import OptionError
from gopt.schedules.actions import Schedule
from gopt.schedules.builders import build_schedule, stages_of
from gopt.schedules.simulation import simulate


def order(schedule: Schedule, member: int) -> str:
    """``F0`` for a forward of micro-batch 0; with two stages, ``b1`` for a backward of the member's first stage."""
    low = {stage: stage == schedule.placement.index(schedule.placement[stage]) for stage in range(schedule.stages)}
    several = schedule.stages > len(schedule.members)
    letters = [
        (action.kind[0].lower() if several and low[action.stage] else action.kind[0].upper()) + str(action.micro_batch)
        for action in schedule.members[member]
    ]
    return " ".join(letters)


@pytest.mark.rest
def test_every_size_runs() -> None:
    for members in range(1, 9):
        for micro_batches in range(1, 17):
            for name in ("gpipe", "1f1b", "interleaved:2", "interleaved:3", "interleaved:4", "zb-h1", "zb-v"):
                schedule = build_schedule(name, members, micro_batches)
                assert schedule.stages == stages_of(name, members) == len(schedule.placement)
                assert schedule.splits_backward == name.startswith("zb")
                simulate(schedule)


def test_orders_are_those_of_the_definitions() -> None:
    assert order(build_schedule("gpipe", 2, 2), 1) == "F0 F1 B0 B1"
    one = build_schedule("1f1b", 3, 4)
    assert order(one, 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order(one, 2) == "F0 B0 F1 B1 F2 B2 F3 B3"
    two = build_schedule("interleaved:2", 2, 4)
    assert two.placement == (0, 1, 0, 1)
    assert order(two, 0) == "f0 f1 F0 F1 f2 B0 f3 B1 F2 b0 F3 b1 B2 B3 b2 b3"
    assert order(two, 1) == "f0 f1 F0 B0 F1 B1 f2 b0 f3 b1 F2 B2 F3 B3 b2 b3"
    split = build_schedule("zb-h1", 3, 3)
    assert order(split, 0) == "F0 F1 F2 I0 W0 I1 W1 I2 W2"
    assert order(split, 2) == "F0 I0 F1 I1 F2 I2 W0 W1 W2"
    bend = build_schedule("zb-v", 2, 3)
    assert bend.placement == (0, 1, 1, 0)
    assert order(bend, 0) == "f0 f1 f2 F0 I0 W0 F1 I1 W1 i0 w0 F2 I2 W2 i1 w1 i2 w2"
    assert order(bend, 1) == "f0 F0 f1 F1 I0 W0 f2 i0 w0 F2 I1 W1 i1 I2 i2 w1 W2 w2"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("1f1", "there is no schedule '1f1'", "did you mean '1f1b'?"),
        ("x/y", "there is no schedule 'x/y'", "there are gpipe, 1f1b, interleaved:V, zb-h1, zb-v"),
        ("interleaved", "how many stages", "write interleaved:2, or 1f1b"),
        ("interleaved:1", "how many stages", "write interleaved:2, or 1f1b"),
        ("interleaved:two", "how many stages", "write interleaved:2, or 1f1b"),
        ("zb-v:2", "zb-v takes no number", "write zb-v"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str, hint: str) -> None:
    with pytest.raises(OptionError, match=message) as refused:
        build_schedule(name, 2, 4)
    assert refused.value.hints[0].startswith(hint)


@pytest.mark.parametrize(("members", "micro_batches"), [(0, 4), (2, 0), (2, 10**9)])
def test_a_wrong_size_is_refused(members: int, micro_batches: int) -> None:
    with pytest.raises(OptionError, match=r"has 0 |more than 1000000"):
        build_schedule("1f1b", members, micro_batches)
