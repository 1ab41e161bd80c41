"""What ``gopt diff`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from .render import console

if TYPE_CHECKING:
    from gopt.offline.diff import Diff

_COLOURS = {"added": "green", "removed": "red"}


def render_diff(found: Diff, *, summary: bool = False) -> None:
    """One difference a line, never wrapped; ``summary``: the counts alone."""
    out = console()
    for line in () if summary else found.lines:
        out.print(Text(str(line), style=_COLOURS.get(line.kind, "")), soft_wrap=True)
    for note in found.notes:
        out.print(Text(f"note: {note}"), soft_wrap=True)
    if found.renamed:
        out.print(f"{found.renamed} inner values have other names, which does not count", soft_wrap=True)
    count, kinds = len(found.lines), found.to_json()["counts"]
    told = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    text = "equal" if found.equal else f"not equal: {count} difference{'s' * (count != 1)} ({told})"
    out.print(text, soft_wrap=True)
