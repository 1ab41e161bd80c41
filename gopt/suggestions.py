"""The nearest known name, for messages about a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from gopt.sanitize import show

MOST = 20_000
"""Names that are compared: each costs some microseconds."""


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """``did you mean 'loss'?``; None where no known name is near."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(islice(known, MOST)), 1)
    return f"did you mean {show(close[0])}?" if close else None
