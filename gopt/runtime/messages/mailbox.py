"""Messages that arrived for one endpoint and have not been received. Callers hold the lock of the hub."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gopt.errors import InvariantError
from gopt.runtime.messages.message import ArraySpec, Header, Message
from gopt.runtime.messages.roster import Settings
from gopt.runtime.session import Array

Allocate = Callable[[Header], Sequence[Array] | None]
"""Where the arrays of a message are to lie; None: in memory of their own."""


@dataclass(slots=True, eq=False)
class Mail:
    """A message whose header has arrived. ``left``: the number of its transfers that are under way."""

    header: Header
    arrays: list[Array]
    left: int = 0


class Mailbox:
    """Messages in the order in which their headers arrived. Messages of one source keep their order."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._slots: list[Mail] = []
        self._bytes = 0
        self.allocate: Allocate | None = None
        self.items: dict[int, deque[Any]] = {}
        """Source -> what it gave to all at the start."""
        self.closed = False
        self.last_heard: dict[int, float] = {}

    def admits(self) -> bool:
        """Return whether another message may come in."""
        return len(self._slots) < self._settings.messages and self._bytes < self._settings.bytes

    def place(self, header: Header, arrays: Sequence[Array] | None = None, owned: bool = True) -> Mail:
        """Take a message in.

        ``arrays``: the arrays, if they have arrived already; they are copied unless they are ``owned`` and the endpoint
        asks for no memory of its own. Raises InvariantError where that memory has another size.
        """
        memory = self._memory(header)
        if memory is None and arrays is not None and owned:
            memory = list(arrays)
        elif memory is None:
            memory = [spec.empty() for spec in header.arrays]
        if arrays is not None:
            for target, array in zip(memory, arrays, strict=True):
                if target is not array:
                    np.copyto(target, array)
        slot = Mail(header, memory)
        self._slots.append(slot)
        self._bytes += header.nbytes
        self.last_heard[header.source] = time.monotonic()
        return slot

    def _memory(self, header: Header) -> list[Array] | None:
        given = self.allocate(header) if self.allocate is not None and header.arrays else None
        if given is None:
            return None
        if tuple(map(ArraySpec.of, given)) != header.arrays or not all(each.flags.c_contiguous for each in given):
            wanted, found = (", ".join(map(str, specs)) for specs in (header.arrays, map(ArraySpec.of, given)))
            raise InvariantError(f"{header} brings {wanted}; the memory for it is {found}")
        return list(given)

    def heads(self) -> list[Header]:
        """Return the receivable messages: the oldest of each source, if it has arrived completely."""
        return [slot.header for slot in self._heads()]

    def _heads(self) -> list[Mail]:
        first: dict[int, Mail] = {}
        for slot in self._slots:
            first.setdefault(slot.header.source, slot)
        return [slot for slot in first.values() if not slot.left]

    def take(self, source: int) -> Message:
        """Remove the oldest message of a source, which is one of ``heads``."""
        slot = next(each for each in self._heads() if each.header.source == source)
        self._slots.remove(slot)
        self._bytes -= slot.header.nbytes
        return Message.from_header(slot.header, slot.arrays)

    def drop(self, source: int) -> None:
        """Remove incomplete messages of a lost source, and those behind them; complete ones before them stay."""
        mine = [slot for slot in self._slots if slot.header.source == source]
        whole = next((place for place, slot in enumerate(mine) if slot.left), len(mine))
        gone = mine[whole:]
        self._slots = [slot for slot in self._slots if slot not in gone]
        self._bytes -= sum(slot.header.nbytes for slot in gone)
