"""``gopt diff --markdown``: a comparison as a comment of a pull request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gopt.text.sanitize import clean

if TYPE_CHECKING:
    from gopt.offline.diff import Diff
    from gopt.offline.diff.sections import Section

MOST_BYTES = 60_000
"""GitHub takes comments of 65,536 characters."""
OPEN = ("Cause", "Ranks")
"""Tables that are not folded."""
_ROWS = (200, 50, 14, 3, 0)
"""Rows of a table: the first number with which the comment is short enough."""
_CELL = 300
"""Characters of a cell."""


def markdown_diff(diff: Diff) -> str:
    """The verdict, cause and ranks, and the rest folded; at most ``MOST_BYTES`` long."""
    for rows in _ROWS:
        text = "\n".join(_lines(diff, rows))
        if len(text.encode()) <= MOST_BYTES:
            break
    return text


def _lines(diff: Diff, rows: int) -> Iterator[str]:
    yield f"### gopt diff: {_text(diff.verdict)}"
    yield ""
    yield f"{_code(diff.a)} → {_code(diff.b)}"
    for section in diff.sections:
        yield ""
        count = len(section.rows) + section.hidden
        if section.title in OPEN:
            yield f"**{_text(section.title)}**"
            yield ""
            yield from _table(section.short(rows))
        else:
            yield f"<details><summary>{_text(section.title)} ({count})</summary>"
            yield ""
            yield from _table(section.short(rows))
            yield ""
            yield "</details>"
    notes = [*diff.notes]
    if diff.renamed:
        notes.append(f"{diff.renamed} inner values have other names, which does not count")
    if notes:
        yield ""
        yield from (f"- {_text(note)}" for note in notes)


def _table(section: Section) -> Iterator[str]:
    if len(section.columns) == 1:
        yield from (f"- {_cells(section, row)[0]}" for row in section.rows)
    else:
        yield f"| {' | '.join(map(_text, section.columns))} |"
        yield f"|{' --- |' * len(section.columns)}"
        for row in section.rows:
            yield f"| {' | '.join(_cells(section, row))} |"
    if section.hidden:
        yield ""
        yield f"and {section.hidden} more"


def _cells(section: Section, row: tuple[str, ...]) -> list[str]:
    """Prose as text; all else as code: GitHub would take names for mentions and formatting."""
    return [
        (_text if column in section.prose else _code)(text) if text else ""
        for column, text in zip(section.columns, row)
    ]


def _code(text: str) -> str:
    """A code span, whatever is in the text."""
    shown = _short(text).replace("|", "\\|")
    ticks = "`" * (1 + max((len(run) for run in _runs(shown)), default=0))
    space = " " if "`" in shown else ""
    return f"{ticks}{space}{shown}{space}{ticks}"


def _runs(text: str) -> Iterator[str]:
    run = ""
    for letter in text:
        run = run + letter if letter == "`" else ""
        yield run


def _text(text: str) -> str:
    shown = _short(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "|`*_[]#@" else letter for letter in shown)


def _short(text: str) -> str:
    line = clean(text.replace("\n", " "))
    return line if len(line) <= _CELL else f"{line[: _CELL - 3]}..."
