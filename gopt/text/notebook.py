"""Results as small HTML tables, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from gopt.text.sanitize import line

ROWS = 40
"""Rows of a table at most; one more row says how many there are beside them."""


class HtmlTable:
    """Gives a result ``_repr_html_``: the ``repr`` above a table of ``html_rows``, by default of ``to_json``."""

    __slots__ = ()

    def html_rows(self) -> Iterable[tuple[str, object]]:
        """Pairs of a label and the value beside it."""
        record: Mapping[str, Any] = self.to_json()  # type: ignore[attr-defined]
        return ((name.replace("_", " "), value) for name, value in record.items() if name != "format")

    def _repr_html_(self) -> str:
        return html_table(repr(self), self.html_rows())


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """One table; every text inside is escaped, and control characters are made visible."""
    pairs = list(rows)
    rest = len(pairs) - ROWS
    lines = [f"<tr><th>{_text(label)}</th><td>{_text(brief(value))}</td></tr>" for label, value in pairs[:ROWS]]
    if rest > 0:
        lines.append(f"<tr><th>…</th><td>{rest} more</td></tr>")
    return f"<table><caption>{_text(title)}</caption><tbody>{''.join(lines)}</tbody></table>"


def brief(value: object) -> str:
    """A value in a cell: a collection by the number of items unless short."""
    if isinstance(value, Mapping):
        simple = len(value) <= 4 and all(isinstance(item, str | int | float) for item in value.values())
        return ", ".join(f"{name} {item}" for name, item in value.items()) if simple else _count(len(value))
    if isinstance(value, list | tuple):
        simple = len(value) <= 4 and all(isinstance(item, str | int | float) for item in value)
        return ", ".join(map(str, value)) if simple else _count(len(value))
    return "" if value is None else str(value)


def _count(number: int) -> str:
    return f"{number} item" if number == 1 else f"{number} items"


def _text(text: str) -> str:
    return escape(line(text))
