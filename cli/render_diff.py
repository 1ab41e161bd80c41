"""Prints the result of ``gopt diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .render import console

if TYPE_CHECKING:
    from gopt.offline.diff import Diff
    from gopt.offline.diff.sections import Section

_COLOURS = {"added": "green", "removed": "red"}


def render_full(diff: Diff) -> None:
    """The tables of a review whole, then every difference on a line, never wrapped."""
    out = console()
    for section in diff.review:
        _render_section(section)
    for line in diff.lines:
        out.print_line(Text(str(line), style=_COLOURS.get(line.kind, "")))


def render_sections(diff: Diff) -> None:
    """Short tables, the cause first."""
    for section in diff.sections:
        _render_section(section.short())


def _render_section(section: Section) -> None:
    out = console()
    out.print(Text(section.title, style="bold"))
    if len(section.columns) == 1:
        for (text,) in section.rows:
            out.print(Text(f"  {text}"))
    else:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for index, column in enumerate(section.columns):
            table.add_column(column, overflow="fold", no_wrap=index == 0)
        for row in section.rows:
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        out.print(table)
    if section.hidden:
        out.print(Text(f"  and {section.hidden} more (--full shows all)", style="dim"))


def render_verdict(diff: Diff) -> None:
    """Notes, and whether both are equal."""
    out = console()
    for note in diff.notes:
        out.print(Text(f"note: {note}"))
    if diff.renamed:
        out.print(f"{diff.renamed} inner values have other names, which does not count")
    out.print(diff.verdict)
