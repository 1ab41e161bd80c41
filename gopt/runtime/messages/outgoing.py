"""A message on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.errors import RunError
from gopt.runtime.messages.message import Header, Message


@dataclass(slots=True, eq=False)
class Sending:
    """A message on its way. ``done``: the memory of the arrays may be used again, or the receiver is lost."""

    to: int
    message: Message
    header: Header
    owned: bool = False
    done: bool = False
    error: RunError | None = None
    left: int = field(default=0)
    """Transfers that are under way."""
