"""A schedule as a record: the actions of a pipeline, in order, for all members of axis ``pp``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class ActionKind(StrEnum):
    """Parts of a step of one stage and one micro-batch. ``INPUT`` and ``WEIGHT`` are the halves of a split backward:
    gradients for the stage before, then gradients of the parameters."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUT = "input"
    WEIGHT = "weight"


def phase_name(kind: ActionKind, chunk: int, chunks: int) -> str:
    """The name of the files of an action; ``chunk``: the number of the stage among ``chunks`` of a member."""
    return kind.value if chunks == 1 else f"{kind.value}.{chunk}"


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

    def runs(self, member: int) -> list[tuple[str, int]]:
        """The files that a member runs for the micro-batches of a step, in order: phase and micro-batch."""
        chunks = max(map(self.placement.count, self.placement))
        chunk_of = {stage: self.placement[:stage].count(home) for stage, home in enumerate(self.placement)}
        return [
            (phase_name(action.kind, chunk_of[action.stage], chunks), action.micro_batch)
            for action in self.members[member]
        ]

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
