"""Statistics of which nothing says how ranks combine them, and the rules that a user may state."""

from __future__ import annotations

from dataclasses import dataclass

RULES = ("mean", "sum", "max", "min", "root", "local")
ROWS = ("local", "root")
"""Rules of a statistic that keeps rows of single samples."""
GATHERED = ("gather", *ROWS)
"""Rules of one whose rows ranks can gather."""
WHOLE = ("mean", "root", "local")
"""Rules that combine new values whole, whatever makes them."""
INTEGERS = ("sum", "max", "min", "root", "local")


@dataclass(frozen=True, slots=True)
class OpenStatistic:
    """Why nothing says how the ranks' values of a statistic are combined.

    ``rules``: those that the user may state. ``literal``: a constant that may be a number of samples.
    """

    reason: str
    rules: tuple[str, ...] = RULES
    literal: str = ""


class Unclear(Exception):
    """Raised where nothing says how the ranks' values of a statistic are combined; the text gives the reason."""

    def __init__(self, reason: str, rules: tuple[str, ...] = RULES, literal: str = "") -> None:
        super().__init__(reason)
        self.statistic = OpenStatistic(reason, rules, literal)
