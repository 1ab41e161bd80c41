"""The interface of messages: sends, receives and waits of one role of a job, on any transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gopt.errors import InvariantError
from gopt.runtime.messages.failures import Awaited
from gopt.runtime.messages.hub import Hub
from gopt.runtime.messages.mailbox import Allocate
from gopt.runtime.messages.message import Kind, Message
from gopt.runtime.messages.order import Arrival
from gopt.runtime.messages.outgoing import Sending
from gopt.runtime.messages.roster import Roster
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class Sent:
    """A message begun by ``isend``. The arrays must not be written before the end of the send."""

    endpoint: Endpoint
    sending: Sending

    @property
    def done(self) -> bool:
        """Whether the memory of the arrays may be used again. Does not advance any transfer."""
        return self.sending.done

    def wait(self, deadline: float | None = None) -> None:
        """Wait until the message is sent; raises LateError after ``deadline`` seconds."""
        self.endpoint.wait_for(self.sending, deadline)


class Endpoint:
    """One role of a job. One thread uses an endpoint at a time.

    Every wait has a deadline in seconds, by default the job's. A wait raises LateError past the deadline, LostError
    when an awaited endpoint is lost and was not dropped, and RunError when another endpoint has failed. The error names
    this endpoint, the awaited endpoints, and the awaited message."""

    def __init__(self, hub: Hub, number: int) -> None:
        self._hub, self.number = hub, number
        self.roster: Roster = hub.roster
        self.name = hub.roster.names[number]
        self.arrivals: list[Arrival] = []
        """The messages that were received, in order: a run on threads can repeat it."""

    @property
    def allocate(self) -> Allocate | None:
        """Called with the header of an incoming message: the memory for the arrays, or None for new memory.

        The function runs on any thread, under a lock, and must not wait. A message is taken in before the receive, so
        the memory must be free from then on. Memory that does not fit the header ends all endpoints."""
        return self._hub.mailboxes[self.number].allocate

    @allocate.setter
    def allocate(self, call: Allocate | None) -> None:
        with self._hub.changed:
            self._hub.mailboxes[self.number].allocate = call

    def message(
        self, kind: Kind, key: int = 0, round_number: int = 0, arrays: Sequence[Array] = (), note: Any = None
    ) -> Message:
        """A message from this endpoint."""
        return Message(kind, self.number, key, round_number, tuple(arrays), note)

    def isend(self, to: int, message: Message, *, owned: bool = False) -> Sent:
        """Begin to send, without waiting. Messages to one endpoint are received in the order of sending.

        ``owned``: the arrays are given away, and not copied between threads. Raises InvariantError for a message of
        another source, or with unsupported arrays."""
        if message.source != self.number or not 0 <= to < self.roster.size:
            raise InvariantError(f"{self.roster.describe(self.number)} sends as endpoint {message.source} to {to}")
        arrays = tuple(np.require(array, requirements="C") for array in message.arrays)
        contiguous = Message(message.kind, message.source, message.key, message.round, arrays, message.note)
        return Sent(self, self._hub.post(Sending(to, contiguous, contiguous.header, owned)))

    def send(self, to: int, message: Message, deadline: float | None = None, *, owned: bool = False) -> None:
        """Send, and wait until the memory of the arrays may be used again. Waits while the receiver's queue is full."""
        self.isend(to, message, owned=owned).wait(deadline)

    def wait_for(self, sending: Sending, deadline: float | None = None) -> None:
        """Wait until a message is sent."""
        if not sending.done:
            awaited = Awaited((sending.to,), f"take {sending.header}")
            self._hub.wait(self.number, lambda: sending.done, deadline, lambda: awaited)
        if sending.error is not None:
            raise sending.error

    def receive(self, deadline: float | None = None, awaited: Callable[[], Awaited] | None = None) -> Message:
        """Return the next message from any endpoint.

        ``awaited`` names the missing message and its sources for errors; by default, any message. The loss of other
        endpoints does not end the wait.
        """
        message = self._hub.receive(self.number, deadline, awaited or self._anything)
        self.arrivals.append(Arrival.of(message.header))
        return message

    def _anything(self) -> Awaited:
        without = {self.number, *self._hub.dropped[self.number]}
        return Awaited(tuple(number for number in range(self.roster.size) if number not in without), "send a message")

    def gather(self, item: Any, deadline: float | None = None, what: str = "the roles' agreement") -> list[Any]:
        """Return the values passed by every endpoint, in the order of their numbers; None for dropped endpoints.

        All endpoints call this method, in the same order. ``item``: a small JSON value."""
        return self._hub.gather(self.number, item, deadline, what)

    def barrier(self, deadline: float | None = None) -> None:
        """Wait until all endpoints have called this method."""
        self.gather(None, deadline, "the barrier")

    def seconds_silent(self, number: int) -> float:
        """Seconds since the last message or sign of life of an endpoint, or since the start if none came."""
        return self._hub.seconds_silent(self.number, number)

    def drop(self, number: int) -> None:
        """Continue without a lost endpoint. Messages to the endpoint count as sent; complete messages from the endpoint
        can still be received."""
        self._hub.drop(self.number, number)

    @property
    def dropped(self) -> frozenset[int]:
        """The endpoints dropped by this endpoint."""
        return frozenset(self._hub.dropped[self.number])

    def why_lost(self, number: int) -> str:
        """The reason for the loss of an endpoint, or ''."""
        return self._hub.lost.get(number, "")

    def tolerate_loss(self, numbers: Iterable[int]) -> None:
        """Drop these endpoints without an error if lost during a ``gather``, which then returns None for them."""
        with self._hub.changed:
            self._hub.tolerated[self.number].update(numbers)

    def fail(self, error: BaseException) -> None:
        """Report that this endpoint cannot continue: the waits of all others end with an error."""
        self._hub.fail(self.number, error)

    def close(self, deadline: float | None = None) -> None:
        """Close in order: wait until all messages of this endpoint are sent and all other endpoints close too."""
        self._hub.close(self.number, deadline)
