"""Runs a schedule without a model: finds faults, and tells times, waiting, and the memory of activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from statistics import fmean

from gopt.errors import OptionError
from gopt.schedules.actions import Action, ActionKind, Schedule, StageAction
from gopt.schedules.builders import INTERLEAVED, is_name, stages_of
from gopt.text.sanitize import listed, show

DEFAULT_SECONDS: Mapping[ActionKind, float] = {
    ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.INPUT: 1, ActionKind.WEIGHT: 1,
}  # fmt: skip
"""A backward has two products for each product of the forward."""
_HINT = "correct the file, or ask for a known schedule"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. ``actions``: for a kind and a stage, elsewhere ``DEFAULT_SECONDS``. ``transfer``: from the
    end of an action to the start of a reader on another member, while both members compute; ``transfers``: the same,
    for the kind and the stage of the sender."""

    actions: Mapping[StageAction, float] = field(default_factory=dict)
    transfer: float = 0
    transfers: Mapping[StageAction, float] = field(default_factory=dict)

    def seconds(self, action: Action) -> float:
        """The time of an action."""
        return self.actions.get(action.of_stage, DEFAULT_SECONDS[action.kind])

    def seconds_behind(self, action: Action) -> float:
        """The time from the end of an action to the start of a reader on another member."""
        return self.transfers.get(action.of_stage, self.transfer)


@dataclass(frozen=True, slots=True)
class TimedAction:
    """The time of an action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """A schedule with times. ``slots``: of each member, in order. ``bubble``: the part of the time without an action,
    a mean over the members. ``peak_live``: for each member, the most forwards whose backward has not ended;
    ``peak_bytes``: of their activations, empty where the bytes of stages are not given."""

    schedule: Schedule
    slots: tuple[tuple[TimedAction, ...], ...]
    makespan: float
    bubble: float
    peak_live: tuple[int, ...]
    peak_bytes: tuple[int, ...] = ()


def simulate(schedule: Schedule, costs: Costs | None = None, stage_bytes: Sequence[int] = ()) -> Simulated:
    """Run a schedule; ``stage_bytes``: of the activations of one micro-batch, for each stage.

    Transfers go between neighbouring stages on different members. A sender does not wait for the receiver; a receiver
    takes messages in the order of the sender. Raises OptionError where an action is missing, double or
    on a wrong member, comes before an operand, waits for ever, or receives out of
    order, and where stages take micro-batches in different orders."""
    for fault in (*structure_faults(schedule), *_missing(schedule), *_own_order(schedule)):
        raise OptionError(f"schedule {show(schedule.name)}: {fault.text}", _HINT)
    slots = _run(schedule, costs or Costs())
    _check_messages(schedule)
    _check_turns(schedule)
    makespan = max((row[-1].end for row in slots if row), default=0)
    busy = [sum(slot.end - slot.start for slot in row) for row in slots]
    return Simulated(
        schedule, slots, makespan,
        bubble=fmean(1 - time / makespan for time in busy) if makespan else 0.0,
        peak_live=_peaks(schedule, [1] * schedule.stages),
        peak_bytes=_peaks(schedule, stage_bytes) if stage_bytes else (),
    )  # fmt: skip


def bubble_formula(name: str, members: int, micro_batches: int) -> Fraction | None:
    """The bubble of a known schedule with the default costs, from the paper; None where the paper gives no formula.

    With p members, m micro-batches, v stages on a member: gpipe and 1f1b (p-1)/(m+p-1) (arXiv 1811.06965, 2006.09503);
    interleaved (p-1)/(vm+p-1) for full groups (2104.04473: (p-1)/v beside m). With equal times of forward, input
    and weight, zb-h1 waits p-1 such times beside 3m, for m >= p (2401.10241, table 1), zb-v p-1 beside 6m, from the
    first start to the last end of all members, for m >= 2p-1 (section 6)."""
    if not is_name(name):
        return None
    chunks = stages_of(name, members) // members
    work, full = {
        "zb-h1": (3 * micro_batches, micro_batches >= members),
        "zb-v": (6 * micro_batches, micro_batches >= 2 * members - 1),
    }.get(name, (chunks * micro_batches, not name.startswith(INTERLEAVED) or micro_batches % members == 0))
    return Fraction(members - 1, work + members - 1) if full else None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of an action; ``slot``: the place in the order of a member."""

    member: int
    slot: int
    text: str


def structure_faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield the actions beyond the size of the schedule, the double ones, and those on a wrong member."""
    homes: dict[Action, int] = {}
    kinds = schedule.kinds
    for member, actions in enumerate(schedule.members):
        for slot, action in enumerate(actions):
            text = _fault(schedule, member, action, homes, kinds)
            if text:
                yield Fault(member, slot, text)
            homes.setdefault(action, member)


def _fault(
    schedule: Schedule, member: int, action: Action, homes: Mapping[Action, int], kinds: Sequence[ActionKind]
) -> str:
    if not 0 <= action.stage < schedule.stages:
        return f"member {member} has the {action}, but stages are 0 to {schedule.stages - 1}"
    if not 0 <= action.micro_batch < schedule.micro_batches:
        return f"member {member} has the {action}, but micro-batches are 0 to {schedule.micro_batches - 1}"
    if action in homes:
        return f"the {action} is there twice, on members {homes[action]} and {member}"
    home = schedule.placement[action.stage]
    if home != member:
        return f"member {member} has the {action}, but stage {action.stage} is on member {home}"
    if action.kind not in kinds:
        return f"member {member} has the {action}, but other backwards are split into input and weight"
    return ""


def _missing(schedule: Schedule) -> Iterator[Fault]:
    present = {action for actions in schedule.members for action in actions}
    kinds = schedule.kinds
    missing = [
        action
        for micro_batch in range(schedule.micro_batches)
        for stage in range(schedule.stages)
        for kind in kinds
        if (action := Action(kind, stage, micro_batch)) not in present
    ]
    if missing:
        member = schedule.placement[missing[0].stage]
        more = f", and {len(missing) - 1} more actions" if len(missing) > 1 else ""
        yield Fault(member, 0, f"member {member} lacks the {missing[0]}{more}")


def _own_order(schedule: Schedule) -> Iterator[Fault]:
    """Yield the actions in front of an operand on the same member."""
    for member, actions in enumerate(schedule.members):
        slots = {action: slot for slot, action in enumerate(actions)}
        for slot, action in enumerate(actions):
            for need in schedule.needs(action):
                if slots.get(need, slot) > slot:
                    yield Fault(member, slot, f"member {member} runs the {action} before the {need}, which it needs")


def _run(schedule: Schedule, costs: Costs) -> tuple[tuple[TimedAction, ...], ...]:
    """The slots of all members; raises OptionError where members wait for ever."""
    ends: dict[Action, float] = {}
    rows: list[list[TimedAction]] = [[] for _ in schedule.members]
    waiting: dict[Action, int] = {}
    ready = list(range(len(rows)))
    while ready:
        member = ready.pop()
        row, actions = rows[member], schedule.members[member]
        while len(row) < len(actions):
            action = actions[len(row)]
            needs = list(schedule.needs(action))
            lacking = next((need for need in needs if need not in ends), None)
            if lacking is not None:
                waiting[lacking] = member
                break
            arrivals = [
                ends[need] + (costs.seconds_behind(need) if schedule.placement[need.stage] != member else 0)
                for need in needs
            ]
            start = max([row[-1].end if row else 0, *arrivals])
            ends[action] = start + costs.seconds(action)
            row.append(TimedAction(action, start, ends[action]))
            if action in waiting:
                ready.append(waiting.pop(action))
    if waiting:
        raise OptionError(f"schedule {show(schedule.name)} waits for ever: {_cycle(schedule, rows, waiting)}", _HINT)
    return tuple(map(tuple, rows))


def _cycle(schedule: Schedule, rows: Sequence[Sequence[TimedAction]], waiting: Mapping[Action, int]) -> str:
    """A circle of members: at an action, a member waits for an action of the next member."""
    wanted = {member: action for action, member in waiting.items()}
    path = [next(iter(wanted))]
    while (member := schedule.placement[wanted[path[-1]].stage]) not in path:
        path.append(member)
    cycle = path[path.index(member) :]
    steps = [
        f"member {member} waits at the {schedule.members[member][len(rows[member])]} for the {wanted[member]}"
        f" of member {schedule.placement[wanted[member].stage]}"
        for member in cycle
    ]
    return listed(steps)


def _check_turns(schedule: Schedule) -> None:
    """Raise OptionError where stages take micro-batches in different orders: values for a stage beyond the next would
    go to wrong micro-batches."""
    turns: dict[StageAction, list[int]] = {}
    for action in (action for row in schedule.members for action in row if action.kind is not ActionKind.WEIGHT):
        turns.setdefault(action.of_stage, []).append(action.micro_batch)
    for (kind, stage), micro_batches in turns.items():
        for turn, wanted in zip(micro_batches, turns[kind, 0], strict=True):
            if turn != wanted:
                raise OptionError(
                    f"schedule {show(schedule.name)}: stage {stage} runs the {kind} of micro-batch {turn} where stage"
                    f" 0 runs micro-batch {wanted}",
                    "all stages take micro-batches in one order, in forwards and in backwards",
                )


def _check_messages(schedule: Schedule) -> None:
    """Raise OptionError where a member receives activations, or gradients, in another order than the sender sends."""
    home = schedule.placement
    actions = [action for row in schedule.members for action in row]
    readers = {source: action for action in actions if (source := schedule.received(action))}
    sent: dict[tuple[ActionKind, int, int], list[Action]] = {}
    wanted: dict[tuple[ActionKind, int, int], list[Action]] = {}
    for messages, sources in ((sent, [action for action in actions if action in readers]), (wanted, readers)):
        for source in sources:
            route = (source.kind, home[source.stage], home[readers[source].stage])
            messages.setdefault(route, []).append(source)
    for (kind, sender, receiver), sources in sent.items():
        for source, needed in zip(sources, wanted[kind, sender, receiver], strict=True):
            if source != needed:
                raise OptionError(
                    f"schedule {show(schedule.name)}: member {sender} sends the result of the {source} to member"
                    f" {receiver}, which wants the result of the {needed} before it",
                    "a member receives in the order in which the sender sends",
                )


def _peaks(schedule: Schedule, weights: Sequence[int]) -> tuple[int, ...]:
    """For each member, the most of the weights of stages at once, from a forward to the end of its backward."""
    signs = {ActionKind.FORWARD: 1, schedule.kinds[-1]: -1}
    changes = ([signs.get(action.kind, 0) * weights[action.stage] for action in row] for row in schedule.members)
    return tuple(max(accumulate(row), default=0) for row in changes)
