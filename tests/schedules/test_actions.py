"""Actions of a schedule: what an action needs, and what it receives from another member."""

from __future__ import annotations

import pytest
from drawn_schedules import draw

from gopt.schedules.actions import Action, ActionKind, Schedule, chunk_numbers, phase_name
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


@pytest.mark.parametrize("seed", range(100))
def test_all_members_run_files_in_the_order_of_the_numbers(seed: int) -> None:
    """A file of a later stage never hands on to a file with a lower number, and no two stages of a member share one."""
    schedule = draw(seed)
    numbers = chunk_numbers(schedule.placement)
    assert list(numbers) == sorted(numbers) and numbers[0] == 0
    for member in range(len(schedule.members)):
        mine = [number for number, home in zip(numbers, schedule.placement) if home == member]
        assert len({*mine}) == len(mine)


@pytest.mark.parametrize("seed", range(100))
def test_every_member_runs_the_files_of_the_last_number(seed: int) -> None:
    """Once for each micro-batch: behind the forward of the member's last stage, and before the backward."""
    schedule = draw(seed)
    numbers, back = chunk_numbers(schedule.placement), INPUT if schedule.splits_backward else BACKWARD
    for member, actions in enumerate(schedule.members):
        runs, count = schedule.runs(member), numbers[-1] + 1
        top = max(number for number, home in zip(numbers, schedule.placement) if home == member)
        assert len({*runs}) == len(runs)
        for micro_batch in range(schedule.micro_batches):
            at = {
                (kind, number): runs.index((phase_name(kind, number, count), micro_batch))
                for kind in (FORWARD, back) for number in (top, numbers[-1])
            }  # fmt: skip
            assert at[FORWARD, top] <= at[FORWARD, numbers[-1]] < at[back, numbers[-1]] <= at[back, top]
        due = [(phase_name(each.kind, numbers[each.stage], count), each.micro_batch) for each in actions]
        assert [run for run in runs if run in {*due}] == due


@pytest.mark.parametrize("name", ["1f1b", "interleaved:3", "zb-v"])
def test_stages_of_known_schedules_are_numbered_on_their_member(name: str) -> None:
    placement = build_schedule(name, 3, 3).placement
    assert chunk_numbers(placement) == tuple(placement[:at].count(home) for at, home in enumerate(placement))
