"""MPI requests under way, and the message of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gopt.runtime.messages.mailbox import Mail
from gopt.runtime.messages.outgoing import Sending
from gopt.runtime.session import Array


@dataclass(slots=True, eq=False)
class Transfer:
    """One MPI request. ``source``, ``to``: endpoints. ``message``: the message with the arrays, None for a header or a
    control value. ``control``: whether the transfer is of a control value. ``memory`` is kept alive while the transfer
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
    """The requests of a process. ``arrays``: the number of requests that receive arrays."""

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
        """Return the transfers ended since the last call, and the transfers given up by MPI, with the error."""
        ended: list[Transfer] = []
        failed: list[tuple[Transfer, str]] = []
        while self.under_way:
            try:
                index, done = self._test(mpi.Request.Testany)
            except mpi.Exception as error:
                gone = [index for index, transfer in enumerate(self.under_way) if not transfer.request]
                if not gone:
                    raise
                failed.append((self._remove(gone[0]), " ".join(str(error).split())))
                continue
            if not done:
                break
            each = self._remove(index)
            if each.message is not None:
                each.message.left -= 1
            ended.append(each)
        return ended, failed

    def _test(self, test: Callable[[list[Any]], tuple[int, bool]]) -> tuple[int, bool]:
        """Return the index of an ended request, and whether a request has ended. MPI advances a part of the arrays at
        each test."""
        requests = [transfer.request for transfer in self.under_way]
        for _ in range(self.looks - 1 if self.arrays else 0):
            index, done = test(requests)
            if done:
                return index, done
        return test(requests)

    def _remove(self, index: int) -> Transfer:
        transfer = self.under_way.pop(index)
        if transfer.message is not None:
            self.arrays -= 1
        return transfer

    def abandon(self, which: Callable[[Transfer], bool]) -> list[Transfer]:
        """Stop watching some transfers; receives among them are cancelled."""
        gone = [transfer for transfer in self.under_way if which(transfer)]
        self.under_way = [transfer for transfer in self.under_way if not which(transfer)]
        for removed in gone:
            if isinstance(removed.message, Mail):
                removed.request.Cancel()
            if removed.message is not None:
                self.arrays -= 1
        self._abandoned += gone
        return gone

    @property
    def settled(self) -> bool:
        """Whether no control value is under way."""
        return not any(transfer.control for transfer in self.under_way)
