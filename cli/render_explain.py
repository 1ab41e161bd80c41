"""Prints the result of ``gopt explain``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .render import console

if TYPE_CHECKING:
    from gopt.offline.explain import Story

_COLOURS = {"removed": "red", "added": "green", "now": "bold"}


def render_story(story: Story) -> None:
    """A fact per line; long facts go on in the next line, under the text."""
    out = console()
    out.print(Text(story.name, style="bold"))
    rows = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    last = ""
    for fact in story.facts:
        about = "" if fact.about == last else fact.about
        rows.add_row(Text(f"  {about}", style=_COLOURS.get(fact.about, "dim")), Text(fact.text))
        last = fact.about
    out.print(rows)
