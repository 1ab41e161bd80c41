"""Order in which messages of different endpoints are received: by arrival, by a seed, or from a record."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gopt.errors import RunError
from gopt.runtime.messages.message import Header, Kind


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message that was received: what a record keeps of it."""

    source: int
    kind: Kind
    key: int
    round: int

    @classmethod
    def of(cls, header: Header) -> Arrival:
        return cls(header.source, header.kind, header.key, header.round)

    def to_json(self) -> list[int]:
        return [self.source, int(self.kind), self.key, self.round]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Arrival:
        source, kind, key, number = values
        return cls(source, Kind(kind), key, number)

    def __str__(self) -> str:
        return f"{self.kind.name} of key {self.key} in round {self.round} from endpoint {self.source}"


class Order(Protocol):
    """Chooses what an endpoint receives next, of the oldest messages of each source."""

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        """Return whether one of them may be received now."""

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        """The source of the one that is received, where one may be."""


class AsTheyCome:
    """The first that came."""

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        return bool(heads)

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        return heads[0].source


class Seeded:
    """Any, by a seed. On threads endpoints then go on one at a time, so that the whole run follows from the seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        return bool(heads)

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        return self._random.choice(sorted(head.source for head in heads))

    def pick(self, numbers: Sequence[int]) -> int:
        """Return the endpoint that continues."""
        return self._random.choice(sorted(numbers))


class Recorded:
    """As in another run: ``arrivals`` has of each endpoint what it received, in order. Behind the end of the record,
    messages are received as they come. Queues have no limit then: who comes next may stand behind any number of others.
    """

    def __init__(self, arrivals: Mapping[int, Sequence[Arrival]]) -> None:
        self._left = {receiver: deque(given) for receiver, given in arrivals.items()}

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        left = self._left.get(receiver)
        return any(not left or head.source == left[0].source for head in heads)

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        """Raises RunError where another message has come from that source."""
        left = self._left.get(receiver)
        if not left:
            return heads[0].source
        wanted = left.popleft()
        head = next(head for head in heads if head.source == wanted.source)
        if Arrival.of(head) != wanted:
            raise RunError(f"the record does not fit: endpoint {receiver} received {wanted}, now it is {head}")
        return wanted.source
