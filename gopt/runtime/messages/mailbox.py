"""Messages arrived for one endpoint and not yet received. Callers hold the lock of the hub."""

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
    """A message with an arrived header. ``left``: the number of transfers under way."""

    header: Header
    arrays: list[Array]
    left: int = 0


class Mailbox:
    """Messages in the order of arrived headers. Messages of one source keep the order of sending."""

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

        ``arrays``: the arrays, if arrived already; they are copied unless they are ``owned`` and the endpoint names no
        memory for them. Raises InvariantError for memory of another size."""
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
        arrays = self.allocate(header) if self.allocate is not None and header.arrays else None
        if arrays is None:
            return None
        if tuple(map(ArraySpec.of, arrays)) != header.arrays or not all(array.flags.c_contiguous for array in arrays):
            wanted, actual = (", ".join(map(str, specs)) for specs in (header.arrays, map(ArraySpec.of, arrays)))
            raise InvariantError(f"{header} brings {wanted}; the memory for it is {actual}")
        return list(arrays)

    def heads(self) -> list[Header]:
        """Return the receivable messages: the oldest of each source, if complete."""
        return [slot.header for slot in self._heads()]

    def _heads(self) -> list[Mail]:
        oldest: dict[int, Mail] = {}
        for slot in self._slots:
            oldest.setdefault(slot.header.source, slot)
        return [slot for slot in oldest.values() if not slot.left]

    def take(self, source: int) -> Message:
        """Remove the oldest message of a source among ``heads``."""
        slot = next(head for head in self._heads() if head.header.source == source)
        self._slots.remove(slot)
        self._bytes -= slot.header.nbytes
        return Message.from_header(slot.header, slot.arrays)

    def drop(self, source: int) -> None:
        """Remove incomplete messages of a lost source, and all following messages; earlier complete messages stay."""
        mine = [slot for slot in self._slots if slot.header.source == source]
        whole = next((index for index, slot in enumerate(mine) if slot.left), len(mine))
        gone = mine[whole:]
        self._slots = [slot for slot in self._slots if slot not in gone]
        self._bytes -= sum(slot.header.nbytes for slot in gone)
