"""MPI requests that are under way, and the message of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gopt.runtime.messages.mailbox import Mail
from gopt.runtime.messages.outgoing import Sending
from gopt.runtime.session import Array


@dataclass(slots=True, eq=False)
class Transfer:
    """One MPI request. ``source``, ``to``: endpoints. ``message``: the message whose arrays are sent, None for a
    header or a control value. ``control``: whether it is a control value. ``memory`` is kept alive while the transfer
    is under way."""

    request: Any
    source: int
    to: int
    memory: Any
    message: Sending | Mail | None = None
    control: bool = False
    waiting: tuple[Sending, list[Array], int] | None = None
    """Of a header: the arrays that are sent when it is taken, and their tag."""


@dataclass(slots=True)
class Transfers:
    """The requests of a process. ``arrays``: how many of them receive arrays."""

    under_way: list[Transfer] = field(default_factory=list)
    arrays: int = 0
    looks: int = 1
    """How often it looks for transfers that have ended, while arrays travel."""
    _abandoned: list[Transfer] = field(default_factory=list)
    """Their memory must stay: MPI does not cancel what was sent."""

    def add(self, transfer: Transfer) -> None:
        self.under_way.append(transfer)
        if transfer.message is not None:
            transfer.message.left += 1
            self.arrays += 1

    def ended(self, mpi: Any) -> tuple[list[Transfer], list[tuple[Transfer, str]]]:
        """Return the transfers that have ended since the last call, and those that MPI gave up, with its error."""
        ended: list[Transfer] = []
        failed: list[tuple[Transfer, str]] = []
        while self.under_way:
            try:
                place, done = self._test(mpi.Request.Testany)
            except mpi.Exception as error:
                gone = [place for place, each in enumerate(self.under_way) if not each.request]
                if not gone:
                    raise
                failed.append((self._remove(gone[0]), " ".join(str(error).split())))
                continue
            if not done:
                break
            each = self._remove(place)
            if each.message is not None:
                each.message.left -= 1
            ended.append(each)
        return ended, failed

    def _test(self, test: Callable[[list[Any]], tuple[int, bool]]) -> tuple[int, bool]:
        """Return the index of a request that has ended, and whether one has. MPI advances a part of the arrays at
        each test."""
        requests = [each.request for each in self.under_way]
        for _ in range(self.looks - 1 if self.arrays else 0):
            place, done = test(requests)
            if done:
                return place, done
        return test(requests)

    def _remove(self, place: int) -> Transfer:
        each = self.under_way.pop(place)
        if each.message is not None:
            self.arrays -= 1
        return each

    def abandon(self, which: Callable[[Transfer], bool]) -> list[Transfer]:
        """Stop watching some transfers; receives among them are cancelled."""
        gone = [each for each in self.under_way if which(each)]
        self.under_way = [each for each in self.under_way if not which(each)]
        for each in gone:
            if isinstance(each.message, Mail):
                each.request.Cancel()
            if each.message is not None:
                self.arrays -= 1
        self._abandoned += gone
        return gone

    @property
    def settled(self) -> bool:
        """Whether no control value is under way."""
        return not any(each.control for each in self.under_way)
