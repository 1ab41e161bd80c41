"""Exchange between servers: each sends a part, server 0 combines the parts, and all receive the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gopt.runtime.messages.endpoint import Endpoint
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Arrays sent or received by one server; ``note``: a small JSON value."""

    arrays: tuple[Array, ...] = ()
    note: Any = None


@dataclass(slots=True)
class ServerExchange:
    """One server's side. All servers make the same calls in the same order.

    ``servers``: the endpoints of all servers, in order. ``receive``: receives one message while these endpoints are
    awaited."""

    endpoint: Endpoint
    servers: Sequence[int]
    receive: Callable[[Sequence[int], str], None]
    _partials: dict[tuple[int, int], dict[int, Message]] = field(default_factory=dict)
    _totals: dict[tuple[int, int], Message] = field(default_factory=dict)
    _slot: tuple[int, int] = (-1, 0)
    """The round and the number of the last call in it."""

    def take(self, message: Message) -> None:
        """Accept a PARTIAL or a TOTAL."""
        slot = message.round, message.key
        if message.kind is Kind.PARTIAL:
            self._partials.setdefault(slot, {})[message.source] = message
        else:
            self._totals[slot] = message

    def __call__(self, round_number: int, part: HeldPart, join: Callable[[list[HeldPart]], list[HeldPart]]) -> HeldPart:
        """Give a part; returns this server's result of ``join``, called on server 0 with all parts."""
        number = self._slot[1] + 1 if self._slot[0] == round_number else 0
        self._slot = slot = round_number, number
        leader, *rest = self.servers
        if self.endpoint.number != leader:
            self.endpoint.send(leader, self._message(Kind.PARTIAL, part))
            while slot not in self._totals:
                self.receive((leader,), f"complete call {number} of round {round_number}")
            total = self._totals.pop(slot)
            return HeldPart(total.arrays, total.note)
        while missing := [server for server in rest if server not in self._partials.get(slot, {})]:
            self.receive(missing, f"give their part of call {number} of round {round_number}")
        came = self._partials.pop(slot, {})
        results = join([part, *(HeldPart(came[server].arrays, came[server].note) for server in rest)])
        for receiver, result in zip(rest, results[1:], strict=True):
            self.endpoint.send(receiver, self._message(Kind.TOTAL, result))
        return results[0]

    def _message(self, kind: Kind, part: HeldPart) -> Message:
        return self.endpoint.message(kind, self._slot[1], self._slot[0], part.arrays, part.note)
