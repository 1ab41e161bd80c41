"""The order of messages received by an endpoint from different sources: by arrival, by a seed, or from a record."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gopt.errors import RunError
from gopt.runtime.messages.message import Header, Kind


class OrderError(RunError):
    """A run does not fit the record of the order."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One received message, as stored in a record."""

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
    """Chooses the next message of an endpoint, among the oldest message of each source."""

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        """Return whether one of these messages may be received now."""

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        """The source of the next message."""


class ByArrival:
    """Receives messages in the order of arrival."""

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        return bool(heads)

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        return heads[0].source


class Serial:
    """An order in which endpoints on threads run one at a time."""

    def pick(self, numbers: Sequence[int]) -> int:
        """Return the endpoint to continue."""
        return min(numbers)


class Recorded:
    """Receives messages in the order of an earlier run. ``arrivals``: the messages received by each endpoint, in order.

    Messages after the end of the record are received as they arrive. Queues have no limit, because the next message of
    the record may be behind any number of others.
    """

    def __init__(self, arrivals: Mapping[int, Sequence[Arrival]]) -> None:
        self._left = {receiver: deque(messages) for receiver, messages in arrivals.items()}

    def ready(self, receiver: int, heads: Sequence[Header]) -> bool:
        expected = self._left.get(receiver)
        return any(not expected or head.source == expected[0].source for head in heads)

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        """The source of the next message of the record. Raises OrderError for another message of this source."""
        expected = self._left.get(receiver)
        if not expected:
            return heads[0].source
        wanted = expected.popleft()
        head = next(head for head in heads if head.source == wanted.source)
        if Arrival.of(head) != wanted:
            raise OrderError(f"the record does not fit: endpoint {receiver} received {wanted}, now it is {head}")
        return wanted.source


class Replayed(Serial, Recorded):
    """As ``Recorded``, with endpoints that run one at a time: a record without a possible continuation is seen at once.

    Raises OrderError at a message behind the end of the record.
    """

    def choose(self, receiver: int, heads: Sequence[Header]) -> int:
        if not self._left.get(receiver):
            raise OrderError(
                f"the record does not fit: it ends, and endpoint {receiver} receives {Arrival.of(heads[0])}"
            )
        return super().choose(receiver, heads)
