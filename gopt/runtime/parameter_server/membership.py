"""The trainers still taking part in a run, as known to one server."""

from __future__ import annotations

from dataclasses import dataclass, field

IDLE = "idle"
"""The note of a trainer that ends a round without data."""


@dataclass(slots=True)
class Trainers:
    """Trainers of a run.

    ``ended``: trainer -> the rounds ended by the trainer. ``idle``: trainer -> the last round ended without data, and
    so without a contribution. ``lost``: trainer -> the reason. ``signal``: the signal that stopped them, or 0."""

    live: set[int]
    ended: dict[int, int] = field(default_factory=dict)
    idle: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    signal: int = 0

    def lose(self, trainer: int, why: str) -> None:
        """Record the loss of a trainer, and the reason."""
        self.live.discard(trainer)
        self.lost[trainer] = why

    def end(self, trainer: int, round_number: int, *, idle: bool) -> None:
        """Record the end of a trainer's contribution to a round."""
        self.ended[trainer] = round_number + 1
        if idle:
            self.idle[trainer] = round_number

    def going(self, round_number: int) -> list[int]:
        """The participating trainers that have not ended a round."""
        return [trainer for trainer in sorted(self.live) if self.ended.get(trainer, 0) <= round_number]

    def complete(self, round_number: int) -> list[int]:
        """The trainers, lost since or not, with a whole contribution to a round here."""
        return [
            trainer for trainer, end in sorted(self.ended.items())
            if end > round_number and self.idle.get(trainer) != round_number
        ]  # fmt: skip
