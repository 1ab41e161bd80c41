"""State shared by the endpoints of one process: mailboxes, and waits.

Subclasses implement the transport.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gopt.errors import RunError
from gopt.runtime.messages import failures
from gopt.runtime.messages.failures import Awaited, LostError, PeerFailure
from gopt.runtime.messages.mailbox import Mail, Mailbox
from gopt.runtime.messages.message import Header, Message
from gopt.runtime.messages.order import ByArrival, Order, Recorded
from gopt.runtime.messages.outgoing import Sending
from gopt.runtime.messages.roster import Roster, Settings
from gopt.runtime.session import Array

Ready = Callable[[], bool]
CLOSED = "closed"
"""Message that an endpoint sends to all others when it closes."""


class Hub(ABC):
    """The endpoints of this process. ``changed`` is the lock over the whole hub, notified at each change.

    Subclasses define how messages are sent and how a waiting thread advances them. Methods with "Lock held" in the
    docstring are called with the lock."""

    def __init__(self, roster: Roster, settings: Settings, local: Sequence[int], order: Order | None = None) -> None:
        self.roster, self.settings = roster, settings
        if isinstance(order, Recorded):  # the next message of the record may be behind any number of others
            settings = replace(settings, messages=sys.maxsize, bytes=sys.maxsize)
        self.mailboxes = {number: Mailbox(settings) for number in local}
        self.changed = threading.Condition()
        self.order: Order = order or ByArrival()
        self.failure: PeerFailure | None = None
        self.lost: dict[int, str] = {}
        """Endpoint that is lost -> why."""
        self.dropped: dict[int, set[int]] = {number: set() for number in local}
        """For each endpoint: the lost ones that it has dropped."""
        self.tolerated: dict[int, set[int]] = {number: set() for number in local}
        """For each endpoint: the ones that it drops automatically if they are lost during a joint operation."""
        self._outboxes: dict[int, deque[Sending]] = {number: deque() for number in range(roster.size)}
        self._unsent = dict.fromkeys(local, 0)
        """For each endpoint: the number of unfinished sends."""
        self._begun = time.monotonic()

    # --- what a subclass does ---

    @abstractmethod
    def _dispatch(self, to: int) -> None:
        """Lock held: send as much of the queue to an endpoint as may be sent."""

    @abstractmethod
    def _tell(self, to: int, item: dict[str, Any]) -> None:
        """Lock held: send a small control value to an endpoint, outside the order of messages."""

    def _advance(self) -> bool:
        """Lock held: advance transfers; returns whether anything has happened."""
        return False

    def _pause(self, idle: int, remaining: float) -> None:
        """Lock held: release the lock and the processor for a moment; ``idle``: how often nothing has happened."""
        self.changed.wait(min(remaining, 1.0))

    def _now(self) -> float:
        return time.monotonic()

    def _blocked(self, number: int, ready: Ready, until: float) -> None:
        """Lock held: an endpoint begins to wait, until the time ``until`` at the latest."""
        return None

    def _unblocked(self, number: int) -> None:
        """Lock held: the wait of an endpoint is over."""
        return None

    def _may_go(self, number: int) -> bool:
        """Lock held: whether an endpoint may run now."""
        return True

    def _expired(self, number: int, until: float) -> bool:
        """Lock held: whether the time of a wait is over."""
        return self._now() >= until

    # --- waiting ---

    def wait(self, number: int, ready: Ready, deadline: float | None, awaited: Callable[[], Awaited]) -> None:
        with self.changed:
            self._wait(number, ready, deadline, awaited)

    def _wait(
        self, number: int, ready: Ready, deadline: float | None, awaited: Callable[[], Awaited], together: bool = False
    ) -> None:
        """Lock held: wait until ``ready`` gives a result. A result takes precedence over a loss, and a failure over
        both."""
        seconds = self.settings.deadline if deadline is None else deadline
        until, idle = self._now() + seconds, 0

        def stirs() -> bool:
            return ready() or self._missed(number, awaited) is not None

        self._blocked(number, stirs, until)
        try:
            while True:
                if self.failure is not None:
                    raise failures.stopped(self.roster, number, self.failure, awaited())
                if self._may_go(number):
                    if ready():
                        return
                    gone = self._missed(number, awaited)
                    if gone is not None and together and gone in self.tolerated[number]:
                        self.drop(number, gone)
                        self._blocked(number, stirs, until)  # others may go on first
                        continue
                    if gone is not None:
                        raise failures.lost(self.roster, number, gone, self.lost[gone], awaited())
                if self._advance():
                    idle = 0
                    self.changed.notify_all()
                elif self._expired(number, until):
                    raise failures.late(self.roster, number, awaited(), seconds)
                else:
                    idle += 1
                    self._pause(idle, until - self._now())
        finally:
            self._unblocked(number)

    def _missed(self, number: int, awaited: Callable[[], Awaited]) -> int | None:
        """Lock held: return a lost endpoint that this endpoint awaits and has not dropped, or None."""
        lost = self.lost.keys() - self.dropped[number]
        return min(lost.intersection(awaited().sources), default=None) if lost else None

    # --- messages ---

    def post(self, sending: Sending) -> Sending:
        """Begin to send a message."""
        source = sending.message.source
        with self.changed:
            if self.failure is not None:
                raise failures.stopped(self.roster, source, self.failure, None)
            self._unsent[source] += 1
            if sending.to in self.dropped[source]:
                self._finish(sending)
            else:
                self._outboxes[sending.to].append(sending)
                self._dispatch(sending.to)
        return sending

    def _finish(self, sending: Sending, error: RunError | None = None) -> None:
        """Lock held: a message is sent, or cannot be."""
        if not sending.done:
            sending.done, sending.error = True, error
            self._unsent[sending.message.source] -= 1
            self.changed.notify_all()

    def receive(self, number: int, deadline: float | None, awaited: Callable[[], Awaited]) -> Message:
        """Take the next message of an endpoint, and so make space for another."""
        mailbox, order = self.mailboxes[number], self.order
        with self.changed:
            self._wait(number, lambda: order.ready(number, mailbox.heads()), deadline, awaited)
            message = mailbox.take(order.choose(number, mailbox.heads()))
            self._room(number)
            return message

    def _room(self, number: int) -> None:
        """Lock held: a mailbox has space again."""
        return None

    def _hand_over(self, to: int) -> None:
        """Lock held: deliver messages to an endpoint of this process."""
        box, mailbox = self._outboxes[to], self.mailboxes[to]
        while box and mailbox.admits():
            sending = box.popleft()
            self._place(to, sending.header, sending.message.arrays, sending.owned)
            self._finish(sending)

    def _place(self, to: int, header: Header, arrays: Sequence[Array] | None = None, owned: bool = True) -> Mail | None:
        """Lock held: take a message in, unless the source was dropped. Memory of the wrong size is a failure of the
        receiver, which ends all endpoints."""
        if header.source in self.dropped[to]:
            return None
        try:
            return self.mailboxes[to].place(header, arrays, owned)
        except Exception as error:
            self._fail(PeerFailure.of(to, error))
            return None

    # --- the control plane ---

    def gather(self, number: int, item: Any, deadline: float | None, what: str) -> list[Any]:
        self._offer(number, item)
        return self._collect(number, deadline, what)

    def _offer(self, number: int, item: Any) -> None:
        """Send an endpoint's value to all endpoints."""
        with self.changed:
            for peer in range(self.roster.size):
                if peer not in self.dropped[number]:
                    self._tell(peer, {"from": number, "item": item})

    def _collect(self, number: int, deadline: float | None, what: str) -> list[Any]:
        """Return the values of all endpoints."""
        items, dropped = self.mailboxes[number].items, self.dropped[number]

        def missing() -> list[int]:
            return [n for n in range(self.roster.size) if n not in dropped and not items.get(n)]

        def awaited() -> Awaited:
            return Awaited(tuple(missing()), f"come to {what}")

        with self.changed:
            self._wait(number, lambda: not missing(), deadline, awaited, True)
            return [items[n].popleft() if items.get(n) else None for n in range(self.roster.size)]

    def _given(self, to: int, item: dict[str, Any]) -> None:
        """Lock held: a value has come for an endpoint."""
        mailbox, source = self.mailboxes[to], item["from"]
        mailbox.last_heard[source] = time.monotonic()
        mailbox.items.setdefault(source, deque()).append(item["item"])
        self.changed.notify_all()

    def seconds_silent(self, number: int, peer: int) -> float:
        return time.monotonic() - self.mailboxes[number].last_heard.get(peer, self._begun)

    def lose(self, number: int, why: str) -> None:
        """Record the loss of an endpoint: waits of others raise until they drop the endpoint."""
        with self.changed:
            self._lose(number, why)

    def _lose(self, number: int, why: str) -> None:
        """Lock held: as ``lose``."""
        self.lost.setdefault(number, why)
        self.changed.notify_all()

    def drop(self, number: int, gone: int) -> None:
        """Let an endpoint continue without another."""
        with self.changed:
            self.dropped[number].add(gone)
            self.mailboxes[number].drop(gone)
            box = self._outboxes[gone]
            for sending in [sending for sending in box if sending.message.source == number]:
                box.remove(sending)
                self._finish(sending)
            self._cancel(number, gone)
            self._room(number)
            self.changed.notify_all()

    def _cancel(self, number: int, gone: int) -> None:
        """Lock held: cancel the transfers between an endpoint and a dropped endpoint."""
        return None

    def fail(self, number: int, error: BaseException) -> None:
        with self.changed:
            self._fail(PeerFailure.of(number, error))

    def _fail(self, failure: PeerFailure) -> None:
        """Lock held: record the first failure."""
        if self.failure is None:
            self.failure = failure
        self.changed.notify_all()

    def close(self, number: int, deadline: float | None) -> None:
        """Wait until this endpoint has sent everything, then until the others have: an endpoint that closes early
        receives nothing more. Lost endpoints are not awaited."""

        def unsent() -> Awaited:
            return Awaited(tuple(self._takers(number)), "take its last messages")

        def control_values() -> Awaited:
            return Awaited((), "come to the end")

        self._without_lost(number, lambda: self.wait(number, lambda: not self._unsent[number], deadline, unsent))
        self._offer(number, CLOSED)
        self._without_lost(number, lambda: self._collect(number, deadline, "the end"))
        self._without_lost(number, lambda: self.wait(number, self._settled, deadline, control_values))
        with self.changed:
            self.mailboxes[number].closed = True
            self._closed()
            self.changed.notify_all()

    def _without_lost(self, number: int, work: Callable[[], object]) -> None:
        """Run a wait again whenever a lost endpoint ends the wait; the endpoint is dropped."""
        while True:
            try:
                work()
                return
            except LostError as lost:
                self.drop(number, lost.number)

    def _takers(self, number: int) -> set[int]:
        """Lock held: return the endpoints that have not received all messages of an endpoint."""
        return {sending.to for box in self._outboxes.values() for sending in box if sending.message.source == number}

    def _settled(self) -> bool:
        """Lock held: whether no control value is under way."""
        return True

    def _closed(self) -> None:
        """Lock held: an endpoint of this process has closed."""
        return None
