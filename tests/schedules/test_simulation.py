"""Simulation: times, waiting and memory as the papers give them; faults by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from drawn_schedules import Executor, draw

from gopt.errors import OptionError
from gopt.schedules.actions import Action, ActionKind, Schedule
from gopt.schedules.builders import build_schedule
from gopt.schedules.simulation import Costs, bubble_formula, simulate

FORWARD, BACKWARD, INPUT, WEIGHT = ActionKind
SIZES = [(members, micro_batches) for members in range(1, 9) for micro_batches in range(1, 17)]
NAMES = ("gpipe", "1f1b", "interleaved:2", "interleaved:3", "zb-h1", "zb-v")


def changed(schedule: Schedule, member: int, *actions: Action) -> Schedule:
    rows = list(schedule.members)
    rows[member] = actions
    return replace(schedule, members=tuple(rows))


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_is_that_of_the_formula(name: str) -> None:
    known = [size for size in SIZES if bubble_formula(name, *size) is not None]
    assert len(known) >= 36
    for size in known:
        assert simulate(build_schedule(name, *size)).bubble == pytest.approx(float(bubble_formula(name, *size) or 0))


def test_peaks_are_those_of_the_papers() -> None:
    for members, micro_batches in SIZES:
        peaks = {name: simulate(build_schedule(name, members, micro_batches)).peak_live for name in NAMES}
        all_members = range(members)
        assert peaks["gpipe"] == (micro_batches,) * members
        assert peaks["1f1b"] == tuple(min(micro_batches, members - member) for member in all_members)
        assert peaks["zb-h1"] == (min(micro_batches, members),) * members
        assert max(peaks["zb-v"]) <= 2 * members
        if micro_batches >= 2 * members - 1:
            assert peaks["zb-v"] == (2 * members,) * members
        if micro_batches % members == 0:
            ahead = [members + 2 * (members - 1 - member) + 1 for member in all_members]
            assert peaks["interleaved:2"] == tuple(min(2 * micro_batches, count) for count in ahead)


def test_times_follow_costs() -> None:
    schedule = build_schedule("1f1b", 2, 1)
    costs = Costs({(FORWARD, 0): 5, (BACKWARD, 1): 7}, transfer=0.5)
    simulated = simulate(schedule, costs, [100, 30])
    assert [[(slot.start, slot.end) for slot in row] for row in simulated.slots] == [
        [(0, 5), (14, 16)], [(5.5, 6.5), (6.5, 13.5)],
    ]  # fmt: skip
    assert simulated.makespan == 16 and simulated.bubble == pytest.approx(1 - (7 + 8) / 32)
    assert simulated.peak_bytes == (100, 30) and simulated.peak_live == (1, 1)
    assert simulate(build_schedule("gpipe", 2, 3), stage_bytes=[100, 30]).peak_bytes == (300, 90)


def test_no_transfer_on_the_same_member() -> None:
    schedule = build_schedule("zb-v", 1, 1)
    assert simulate(schedule, Costs(transfer=100)).makespan == 6


@pytest.mark.parametrize("seed", range(60))
def test_a_drawn_schedule_runs(seed: int) -> None:
    schedule = draw(seed)
    simulated = simulate(schedule)
    ends = {slot.action: slot for row in simulated.slots for slot in row}
    assert all(ends[need].end <= slot.start for slot in ends.values() for need in schedule.needs(slot.action))
    assert all(first.end <= second.start for row in simulated.slots for first, second in pairwise(row))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_planted_is_named(seed: int) -> None:
    schedule, random = draw(seed), Random(seed)
    member = random.randrange(len(schedule.members))
    row = list(schedule.members[member])
    slot = random.randrange(len(row))
    plants = {
        f"member {member} lacks the {row[slot]}$": (*row[:slot], *row[slot + 1 :]),
        f"the {row[slot]} is there twice, on members {member} and {member}$": (*row[:slot], row[slot], *row[slot:]),
        "but stages are 0 to": (*row, replace(row[slot], stage=schedule.stages)),
        "but micro-batches are 0 to": (*row, replace(row[slot], micro_batch=-1)),
    }
    index = {action: at for at, action in enumerate(row)}
    pairs = [(index[need], at) for at, action in enumerate(row) for need in schedule.needs(action) if need in index]
    if pairs:
        before, after = random.choice(pairs)
        swapped = list(row)
        swapped[before], swapped[after] = row[after], row[before]
        plants[f"member {member} runs the .* before the .*, which it needs"] = tuple(swapped)
    for message, actions in plants.items():
        with pytest.raises(OptionError, match=message):
            simulate(changed(schedule, member, *actions))
    if len(schedule.members) > 1:
        rows = list(schedule.members)
        rows[0], rows[1] = rows[1], rows[0]
        with pytest.raises(OptionError, match=r"but stage \d+ is on member"):
            simulate(replace(schedule, members=tuple(rows)))


@pytest.mark.parametrize("seed", range(60))
def test_an_exchange_is_refused_exactly_where_it_cannot_run(seed: int) -> None:
    schedule, random = draw(seed), Random(seed)
    for _ in range(20):
        member = random.randrange(len(schedule.members))
        row = list(schedule.members[member])
        first, second = random.randrange(len(row)), random.randrange(len(row))
        row[first], row[second] = row[second], row[first]
        exchanged = changed(schedule, member, *row)
        if Executor.accepts(exchanged):
            simulate(exchanged)
        else:
            with pytest.raises(OptionError, match=r"before|waits for ever|where stage 0 runs"):
                simulate(exchanged)


def test_members_that_wait_for_one_another_are_named() -> None:
    rows = [
        [Action(FORWARD, 2, 0), Action(FORWARD, 0, 0), Action(BACKWARD, 2, 0), Action(BACKWARD, 0, 0)],
        [Action(FORWARD, 1, 0), Action(BACKWARD, 1, 0)],
    ]
    with pytest.raises(OptionError, match="waits for ever") as refused:
        simulate(Schedule("mine", 3, 1, (0, 1, 0), tuple(map(tuple, rows))))
    message = refused.value.message
    assert (
        "member 0 waits at the forward of stage 2, micro-batch 0 for the forward of stage 1, micro-batch 0" in message
    )
    assert "member 1 waits at the forward of stage 1, micro-batch 0 for the forward of stage 0" in message


def test_receives_in_another_order_than_sends_are_named() -> None:
    schedule = build_schedule("gpipe", 2, 2)
    first, second, *rest = schedule.members[1]
    with pytest.raises(
        OptionError, match=r"member 0 sends .* stage 0, micro-batch 0 to member 1, which wants .* micro-batch 1"
    ):
        simulate(changed(schedule, 1, second, first, *rest))


def test_stages_that_take_micro_batches_in_different_orders_are_named() -> None:
    rows = [Action(kind, stage, mb) for kind, stage, mb in (
        (FORWARD, 0, 0), (FORWARD, 0, 1), (FORWARD, 1, 1), (FORWARD, 1, 0),
        (BACKWARD, 1, 0), (BACKWARD, 0, 0), (BACKWARD, 1, 1), (BACKWARD, 0, 1),
    )]  # fmt: skip
    with pytest.raises(OptionError, match="stage 1 runs the forward of micro-batch 1 where stage 0 runs micro-batch 0"):
        simulate(Schedule("mine", 2, 2, (0, 0), (tuple(rows),)))


def test_a_schedule_splits_all_backwards_or_none() -> None:
    schedule = build_schedule("zb-h1", 1, 1)
    with pytest.raises(OptionError, match="other backwards are split"):
        simulate(changed(schedule, 0, *schedule.members[0], Action(BACKWARD, 0, 0)))
