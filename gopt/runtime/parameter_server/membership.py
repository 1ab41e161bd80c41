"""The trainers that still take part in a run, as one server knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

IDLE = "idle"
"""The note of a trainer that ends a round without data."""


@dataclass(slots=True)
class Trainers:
    """Trainers of a run.

    ``ended``: trainer -> the rounds that it has ended. ``idle``: trainer -> the last round that it ended without data,
    and so without a contribution. ``lost``: trainer -> the reason. ``signal``: the signal for which they stopped, or 0.
    """

    live: set[int]
    ended: dict[int, int] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    signal: int = 0

    def lose(self, trainer: int, why: str) -> None:
        """Record that a trainer is lost, and why."""
        self.live.discard(trainer)
        self.lost[trainer] = why

    def end(self, trainer: int, round_number: int, *, idle: bool) -> None:
        """Record that a trainer has pushed its whole contribution to a round."""
        self.ended[trainer] = round_number + 1
        if idle:
            self.idle[trainer] = round_number

    def going(self, round_number: int) -> list[int]:
        """The trainers that take part and have not ended a round."""
        return [each for each in sorted(self.live) if self.ended.get(each, 0) <= round_number]

    def complete(self, round_number: int) -> list[int]:
        """The trainers, lost since or not, whose whole contribution to a round is here."""
        return [
            each for each, end in sorted(self.ended.items())
            if end > round_number and self.idle.get(each) != round_number
        ]  # fmt: skip
