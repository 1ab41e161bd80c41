"""Prints the result of ``gopt golden check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from .render import console

if TYPE_CHECKING:
    from gopt.offline.goldens.golden_files import GoldenCheck

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


def render_check(check: GoldenCheck, folder: str) -> None:
    """A unified diff of each golden that differs, and the command accepting the change."""
    out = console()
    for lines in check.differing.values():
        for line in lines:
            out.print_line(Text(line, style=_COLOURS.get(line[:1], "")))
    for name in check.missing:
        out.print(Text(f"missing: golden/{name}", style="red"))
    for name in check.extra:
        out.print(Text(f"extra: golden/{name}: no case asks for it", style="red"))
    if check.equal:
        out.print("equal")
    else:
        out.print(Text(f"to accept: gopt golden update {folder}"))
