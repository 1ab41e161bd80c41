"""Messages on their way from a role: the memory of the arrays must not be written before they are sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.runtime.messages.endpoint import Endpoint, Sent
from gopt.runtime.messages.message import Message


@dataclass(slots=True)
class Outbox:
    """Messages of one endpoint on their way."""

    endpoint: Endpoint
    _leaving: list[Sent] = field(default_factory=list)

    def settle(self) -> None:
        """Forget the messages that are sent: the memory of their arrays is free."""
        self._leaving = [sent for sent in self._leaving if not sent.done]

    def send(self, to: int, message: Message) -> None:
        """Begin to send, without waiting."""
        self.settle()
        self._leaving.append(self.endpoint.isend(to, message))

    def flush(self) -> None:
        """Wait until all messages are sent."""
        for sent in self._leaving:
            sent.wait()
        self._leaving.clear()
