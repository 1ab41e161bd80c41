"""The pushes of trainers to a round, by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.runtime.merge import Contribution
from gopt.runtime.messages.message import Kind, Message


@dataclass(slots=True)
class Contributions:
    """Contributions by round and by bucket or table.

    A message is applied at most once: a second contribution of a trainer to a round and bucket, and a contribution to a
    past round, is dropped and counted."""

    round: int = 0
    dropped: int = 0
    _pushes: dict[tuple[int, Kind, int], dict[int, Contribution]] = field(default_factory=dict)

    def add(self, message: Message) -> bool:
        """Take a PUSH or PUSH_ROWS; returns whether the message counts."""
        slot = message.round, message.kind, message.key
        if message.round < self.round or message.source in self._pushes.get(slot, ()):
            self.dropped += 1
            return False
        weight = 1.0 if message.note is None else float(message.note["weight"])
        ids = message.arrays[0] if message.kind is Kind.PUSH_ROWS else None
        self._pushes.setdefault(slot, {})[message.source] = Contribution(message.arrays[-1], weight, ids)
        return True

    def of(self, bucket: int, kind: Kind = Kind.PUSH) -> dict[int, Contribution]:
        """The contributions to a bucket in this round, by trainer; to a table where the kind is PUSH_ROWS."""
        return self._pushes.get((self.round, kind, bucket), {})

    def any(self) -> bool:
        """Return whether there is any contribution to this round."""
        return any(number == self.round for number, _, _ in self._pushes)

    def sources(self) -> set[int]:
        """Trainers with a contribution to this round."""
        return {source for (number, _, _), slot in self._pushes.items() if number == self.round for source in slot}

    def next_round(self) -> None:
        """Remove the contributions to this round."""
        for key in [key for key in self._pushes if key[0] <= self.round]:
            del self._pushes[key]
        self.round += 1
