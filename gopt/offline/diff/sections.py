"""A comparison as short tables, for people: how both a terminal and a pull request show it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MOST_ROWS = 14
"""Rows of a table that are shown unless all are asked for: all tables together stay below 200 lines."""
TITLES = {
    "model": "Model", "input": "Inputs", "output": "Outputs", "state": "States", "bytes": "Bytes of states",
    "record": "Records", "op": "Operators of another type", "attribute": "Attributes", "rewired": "Operands",
    "removed": "Removed operators", "added": "Added operators", "value": "Values",
}  # fmt: skip
"""Kind of a difference -> the title of its table, in their order."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table; ``hidden`` counts rows that are left out. ``prose``: the columns that hold gopt's own words; all others
    hold names, numbers and changes, in the words of a file."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(repr=False)
    hidden: int = 0
    prose: frozenset[str] = frozenset()

    def short(self, most: int = MOST_ROWS) -> Section:
        """The first rows alone."""
        left = max(0, len(self.rows) - most)
        return replace(self, rows=self.rows[:most], hidden=self.hidden + left) if left else self

    def to_json(self) -> dict[str, Any]:
        rows = [list(row) for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "hidden": self.hidden}


def kind_sections(lines: Iterable[tuple[str, str, str]]) -> tuple[Section, ...]:
    """Differences, each as kind, place and text, as one table for each kind."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, where, text in lines:
        found.setdefault(kind, []).append((where, text))
    made = []
    for kind, title in TITLES.items():
        rows = found.get(kind, [])
        if rows:
            made.append(table(title, ("where", "what") if any(where for where, _ in rows) else ("what",), rows))
    return tuple(made)


def table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Section:
    """A table of the last columns of rows: as many as it has titles for."""
    return Section(title, columns, tuple(row[-len(columns) :] for row in rows))
