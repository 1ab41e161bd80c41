"""A schedule as a record: the actions of a pipeline, in order, for all members of axis ``pp``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache


class ActionKind(StrEnum):
    """Parts of a step of one stage and one micro-batch. ``INPUT`` and ``WEIGHT`` are the halves of a split backward:
    gradients for the stage before, then gradients of the parameters."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


def phase_name(kind: ActionKind, chunk: int, chunks: int) -> str:
    """The name of the files of an action; ``chunk``: the number of the stage in ``chunk_numbers``, of ``chunks``."""
    return kind.value if chunks == 1 else f"{kind.value}.{chunk}"


@cache
def chunk_numbers(placement: tuple[int, ...]) -> tuple[int, ...]:
    """Stage -> the number in the names of files: above the numbers of earlier stages on the member, and at least the
    number of the stage before. All members run files in the order of the numbers, so a sender runs before the receiver,
    or with the receiver."""
    numbers: list[int] = []
    last: dict[int, int] = {}
    for member in placement:
        last[member] = max([last.get(member, -1) + 1, *numbers[-1:]])
        numbers.append(last[member])
    return tuple(numbers)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """A part of a step: of one stage, for one micro-batch."""

    kind: ActionKind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"

    @property
    def of_stage(self) -> StageAction:
        """The same for all micro-batches."""
        return self.kind, self.stage


StageAction = tuple[ActionKind, int]
"""The kind of an action, and the stage."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of all members of the pipeline axis, in order.

    ``name``: as asked: ``1f1b``, ``interleaved:2``, or the name of a file. ``placement``: stage -> member."""

    name: str
    stages: int
    micro_batches: int
    placement: tuple[int, ...]
    members: tuple[tuple[Action, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """Whether backwards are two actions, ``INPUT`` and ``WEIGHT``."""
        halves = (ActionKind.INPUT, ActionKind.WEIGHT)
        return any(action.kind in halves for actions in self.members for action in actions)

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """The kinds of action of every stage and micro-batch."""
        split = self.splits_backward
        return tuple(
            kind for kind in ActionKind if kind is ActionKind.FORWARD or (kind is ActionKind.BACKWARD) != split
        )

    @property
    def phases(self) -> set[str]:
        """The names of the files of all actions."""
        chunks = chunk_numbers(self.placement)[-1] + 1
        return {phase_name(kind, chunk, chunks) for kind in self.kinds for chunk in range(chunks)}

    @property
    def forwards(self) -> list[int]:
        """The micro-batches in the order in which every stage takes them forward."""
        entry = self.members[self.placement[0]]
        return [action.micro_batch for action in entry if action.of_stage == (ActionKind.FORWARD, 0)]

    def runs(self, member: int) -> list[tuple[str, int]]:
        """The files that a member runs for the micro-batches of a step, in order: phase and micro-batch.

        Values for all members arrive with the last number: a member without a stage of this number runs the files
        behind the forward, and before the backward, of the member's last stage."""
        numbers = chunk_numbers(self.placement)
        last, top = numbers[-1], max(number for number, home in zip(numbers, self.placement) if home == member)
        runs: list[tuple[str, int]] = []
        for action in self.members[member]:
            chunks = [numbers[action.stage]]
            if chunks[0] == top < last and action.kind is not ActionKind.WEIGHT:
                chunks.insert(1 if action.kind is ActionKind.FORWARD else 0, last)
            runs += [(phase_name(action.kind, chunk, last + 1), action.micro_batch) for chunk in chunks]
        return runs

    def needs(self, action: Action) -> Iterator[Action]:
        """Yield the actions that must end before an action starts; on another member, the last is a transfer."""
        kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
        if kind is ActionKind.WEIGHT:
            yield Action(ActionKind.INPUT, stage, micro_batch)
            return
        if kind is not ActionKind.FORWARD:
            yield Action(ActionKind.FORWARD, stage, micro_batch)
        neighbour = stage - 1 if kind is ActionKind.FORWARD else stage + 1
        if 0 <= neighbour < self.stages:
            yield Action(kind, neighbour, micro_batch)

    def received(self, action: Action) -> Action | None:
        """The action on another member with the result for an action; None where nothing is received."""
        home = self.placement[action.stage]
        return next((need for need in self.needs(action) if self.placement[need.stage] != home), None)
