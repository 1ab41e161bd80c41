"""What a role has sent and not all of which has left: the memory of its arrays may not be written until then."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.runtime.messages.endpoint import Endpoint, Sent
from gopt.runtime.messages.message import Message


@dataclass(slots=True)
class Outbox:
    """Messages of one endpoint that are on their way."""

    endpoint: Endpoint
    _leaving: list[Sent] = field(default_factory=list)

    def send(self, to: int, message: Message) -> None:
        """Begin to send, without waiting."""
        self._leaving = [sent for sent in self._leaving if not sent.done]
        self._leaving.append(self.endpoint.isend(to, message))

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        for sent in self._leaving:
            sent.wait()
        self._leaving.clear()
