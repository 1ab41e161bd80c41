"""What trainers pushed of a round, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.runtime.merge import Contribution
from gopt.runtime.messages.message import Message


@dataclass(slots=True)
class Contributions:
    """Contributions by round and bucket. A second one of the same trainer to the same round and bucket, and one to a
    round that is over, is dropped and counted: a message is applied once at most."""

    round: int = 0
    dropped: int = 0
    _held: dict[tuple[int, int], dict[int, Contribution]] = field(default_factory=dict)

    def add(self, message: Message) -> bool:
        """Take a PUSH; returns whether it counts."""
        slot = self._held.setdefault((message.round, message.key), {})
        if message.round < self.round or message.source in slot:
            self.dropped += 1
            if not slot:
                del self._held[message.round, message.key]
            return False
        weight = 1.0 if message.note is None else float(message.note["weight"])
        slot[message.source] = Contribution(message.arrays[0], weight)
        return True

    def of(self, bucket: int) -> dict[int, Contribution]:
        """What came of a bucket in this round, by trainer."""
        return self._held.get((self.round, bucket), {})

    def any(self) -> bool:
        """Whether anything came of this round."""
        return any(number == self.round for number, _ in self._held)

    def next_round(self) -> None:
        """Forget this round."""
        for key in [key for key in self._held if key[0] <= self.round]:
            del self._held[key]
        self.round += 1
