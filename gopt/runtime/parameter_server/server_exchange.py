"""Exchange between servers: each sends its part, server 0 combines the parts, and all receive the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Arrays that one server sends or receives; ``note`` is a small value that JSON can hold."""

    arrays: tuple[Array, ...] = ()
    note: Any = None


@dataclass(slots=True)
class ServerExchange:
    """One server's side. All servers make the same calls in the same order.

    ``servers``: the endpoints of all servers, in order. ``receive``: receives one message while these endpoints are
    awaited.
    """

    endpoint: Endpoint
    servers: Sequence[int]
    receive: Callable[[Sequence[int], str], None]
    _partials: dict[tuple[int, int], dict[int, Message]] = field(default_factory=dict)
    _totals: dict[tuple[int, int], Message] = field(default_factory=dict)
    _place: tuple[int, int] = (-1, 0)
    """The round and the number of the last call in it."""

    def take(self, message: Message) -> None:
        """Accept a PARTIAL or a TOTAL."""
        place = message.round, message.key
        if message.kind is Kind.PARTIAL:
            self._partials.setdefault(place, {})[message.source] = message
        else:
            self._totals[place] = message

    def __call__(self, round_number: int, part: HeldPart, join: Callable[[list[HeldPart]], list[HeldPart]]) -> HeldPart:
        """Give a part; returns this server's result of ``join``, which server 0 calls with all parts."""
        number = self._place[1] + 1 if self._place[0] == round_number else 0
        self._place = place = round_number, number
        first, *others = self.servers
        if self.endpoint.number != first:
            self.endpoint.send(first, self._message(Kind.PARTIAL, part))
            while place not in self._totals:
                self.receive((first,), f"complete call {number} of round {round_number}")
            total = self._totals.pop(place)
            return HeldPart(total.arrays, total.note)
        while missing := [each for each in others if each not in self._partials.get(place, {})]:
            self.receive(missing, f"give their part of call {number} of round {round_number}")
        came = self._partials.pop(place, {})
        results = join([part, *(HeldPart(came[each].arrays, came[each].note) for each in others)])
        for other, result in zip(others, results[1:], strict=True):
            self.endpoint.send(other, self._message(Kind.TOTAL, result))
        return results[0]

    def _message(self, kind: Kind, part: HeldPart) -> Message:
        return self.endpoint.message(kind, self._place[1], self._place[0], part.arrays, part.note)
