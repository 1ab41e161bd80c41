"""Actions of a schedule: what an action needs, and what it receives from another member."""

from __future__ import annotations

from gopt.schedules.actions import Action, ActionKind, Schedule
from gopt.schedules.builders import build_schedule

FORWARD, BACKWARD, INPUT, WEIGHT = ActionKind


def test_what_an_action_needs() -> None:
    schedule = Schedule("mine", 3, 1, (0, 1, 1), ((), ()))
    needs = {
        Action(FORWARD, 0, 0): [],
        Action(FORWARD, 2, 0): [Action(FORWARD, 1, 0)],
        Action(BACKWARD, 2, 0): [Action(FORWARD, 2, 0)],
        Action(BACKWARD, 0, 0): [Action(FORWARD, 0, 0), Action(BACKWARD, 1, 0)],
        Action(INPUT, 1, 0): [Action(FORWARD, 1, 0), Action(INPUT, 2, 0)],
        Action(WEIGHT, 1, 0): [Action(INPUT, 1, 0)],
    }
    for action, wanted in needs.items():
        assert list(schedule.needs(action)) == wanted
    received = {action: schedule.received(action) for action in needs}
    assert {action for action, source in received.items() if source} == {Action(BACKWARD, 0, 0)}
    assert schedule.received(Action(FORWARD, 1, 0)) == Action(FORWARD, 0, 0)


def test_kinds_of_a_schedule() -> None:
    assert build_schedule("1f1b", 2, 2).kinds == (FORWARD, BACKWARD)
    assert build_schedule("zb-h1", 2, 2).kinds == (FORWARD, INPUT, WEIGHT)
    assert str(Action(WEIGHT, 1, 7)) == "weight of stage 1, micro-batch 7"
