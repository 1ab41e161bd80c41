"""Requests of MPI that are under way, and what each is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gopt.runtime.messages.mailbox import Slot
from gopt.runtime.messages.outgoing import Sending


@dataclass(slots=True, eq=False)
class Transfer:
    """``source``, ``to``: endpoints; ``message``: whose arrays travel, None for a header or what goes beside messages;
    ``aside``: whether it does; ``memory`` must stay while the transfer is under way."""

    request: Any
    source: int
    to: int
    memory: Any
    message: Sending | Slot | None = None
    aside: bool = False


@dataclass(slots=True)
class Transfers:
    """``arrays``: how many of them bring arrays."""

    under_way: list[Transfer] = field(default_factory=list)
    arrays: int = 0
    _abandoned: list[Transfer] = field(default_factory=list)
    """Their memory must stay: MPI does not cancel what was sent."""

    def add(self, transfer: Transfer) -> None:
        self.under_way.append(transfer)
        if transfer.message is not None:
            transfer.message.left += 1
            self.arrays += 1

    def ended(self, mpi: Any) -> list[Transfer]:
        """Those that have ended since the last call, in the order in which they began."""
        if not self.under_way:
            return []
        done = mpi.Request.Testsome([each.request for each in self.under_way])
        if not done:
            return []
        gone = set(done)
        ended = [each for place, each in enumerate(self.under_way) if place in gone]
        self.under_way = [each for place, each in enumerate(self.under_way) if place not in gone]
        for each in ended:
            if each.message is not None:
                each.message.left -= 1
                self.arrays -= 1
        return ended

    def abandon(self, which: Callable[[Transfer], bool]) -> list[Transfer]:
        """Look no longer at some of them; what is to be received is cancelled."""
        gone = [each for each in self.under_way if which(each)]
        self.under_way = [each for each in self.under_way if not which(each)]
        for each in gone:
            if isinstance(each.message, Slot):
                each.request.Cancel()
            if each.message is not None:
                self.arrays -= 1
        self._abandoned += gone
        return gone

    @property
    def settled(self) -> bool:
        """Whether nothing is under way beside messages."""
        return not any(each.aside for each in self.under_way)
