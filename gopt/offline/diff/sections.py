"""A comparison as short tables for people, on a terminal and in a pull request."""

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
    """A table; ``hidden`` counts omitted rows. ``prose``: the columns with gopt's words; all others have names, numbers
    and changes, in the words of a file."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = field(repr=False)
    hidden: int = 0
    prose: frozenset[str] = frozenset()

    def short(self, most: int = MOST_ROWS) -> Section:
        """The first rows alone."""
        more = max(0, len(self.rows) - most)
        return replace(self, rows=self.rows[:most], hidden=self.hidden + more) if more else self

    def to_json(self) -> dict[str, Any]:
        rows = [list(row) for row in self.rows]
        return {"title": self.title, "columns": list(self.columns), "rows": rows, "hidden": self.hidden}


def kind_sections(lines: Iterable[tuple[str, str, str]]) -> tuple[Section, ...]:
    """Differences, each as kind, place and text, as one table for each kind."""
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for kind, where, text in lines:
        by_kind.setdefault(kind, []).append((where, text))
    tables = []
    for kind, title in TITLES.items():
        rows = by_kind.get(kind, [])
        if rows:
            tables.append(table(title, ("where", "what") if any(where for where, _ in rows) else ("what",), rows))
    return tuple(tables)


def table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Section:
    """A table of the last columns of rows, as many as titles."""
    return Section(title, columns, tuple(row[-len(columns) :] for row in rows))
