"""What commands print on a terminal, as a picture in SVG that needs no font and no network."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from xml.etree import ElementTree

from gopt.cli.main import main
from rich.console import Console
from rich.text import Text

FIRST, LINE, CELL = 20.0, 24.4, 12.2
"""Base of the first line, height of a line and width of a character in a picture, in its units."""
_ENVIRONMENT = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
_NO_COLOUR = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "GITHUB_ACTIONS", "CI")
_FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True, slots=True)
class Screen:
    """Commands in one terminal, and the picture of what they print."""

    name: str
    """The file, without its suffix."""
    commands: tuple[str, ...]
    columns: int = 100
    prepare: Callable[[], None] = nothing
    """Makes what the commands need, in the current folder."""
    measures: bool = False
    """Whether the commands print times, or errors in the last digits: these differ from run to run."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command, what it printed and its seconds."""

    command: str
    lines: tuple[Text, ...]
    seconds: float


class Terminal(io.StringIO):
    """Takes text as a terminal does: with colours."""

    def isatty(self) -> bool:
        return True


def run(screen: Screen) -> list[Ran]:
    """Run the commands of a screen, one after the other, in a folder of their own."""
    found = []
    with workplace(screen.columns):
        screen.prepare()
        for command in screen.commands:
            begin = perf_counter()
            text = Text.from_ansi(printed(command).rstrip("\n"))
            found.append(Ran(command, folded(text, screen.columns), perf_counter() - begin))
    return found


def printed(command: str, errors: io.StringIO | None = None) -> str:
    """What a gopt command prints on a terminal, notes last; its exit code is 0 or 1. ``errors`` takes the progress."""
    errors = errors or io.StringIO()
    with contextlib.redirect_stdout(Terminal()) as told, contextlib.redirect_stderr(errors):
        code = main(shlex.split(command, comments=True)[1:])
    if code not in (0, 1):
        raise RuntimeError(f"{command}: {code}: {errors.getvalue()}")
    return told.getvalue() + ("" if errors.isatty() else errors.getvalue())


def folded(text: Text, columns: int) -> tuple[Text, ...]:
    """The lines of a text, those that are too long for the terminal broken between words."""
    console = Console(width=columns, file=io.StringIO())
    return tuple(part for line in text.split(allow_blank=True) for part in line.wrap(console, columns) or [Text()])


@contextlib.contextmanager
def workplace(columns: int) -> Iterator[None]:
    """An empty folder to work in, and the environment of a terminal; afterwards all is as it was."""
    here, before = Path.cwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as home:
        try:
            os.environ.update(_ENVIRONMENT, COLUMNS=str(columns))
            for name in _NO_COLOUR:
                os.environ.pop(name, None)
            os.chdir(home)
            yield
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)


def transcript(ran: Sequence[Ran]) -> list[Text]:
    """All lines in order: each command behind a ``$``, what it printed, and an empty line between two."""
    found: list[Text] = []
    for each in ran:
        found += [Text()] if found else []
        found += [Text(f"$ {each.command}", style="bold"), *each.lines]
    return found


def drawn(lines: Sequence[Text], name: str, columns: int, code_format: str = _FORMAT) -> str:
    """Lines as a picture; its parts are named by ``name``, so that one page may hold several."""
    console = Console(record=True, width=columns, file=io.StringIO(), highlight=False, force_terminal=True)
    for line in lines:
        console.print(line, soft_wrap=True)
    picture = console.export_svg(title="gopt", unique_id=name, code_format=code_format)
    return re.sub(r' clip-path="url\(#[\w-]+-line-\d+\)"|<text [^>]*>\n</text>', "", picture)


def svg(screen: Screen) -> str:
    """The picture of a screen."""
    return drawn(transcript(run(screen)), screen.name, screen.columns)


def shown(picture: str) -> list[str]:
    """The lines of text that a picture shows, without its title and without spaces at their ends."""
    rows: dict[int, str] = {}
    for each in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"):
        if "textLength" in each.attrib:
            row = round((float(each.attrib["y"]) - FIRST) / LINE)
            before = rows.get(row, "").ljust(round(float(each.attrib["x"]) / CELL))
            rows[row] = before + "".join(each.itertext()).strip("\n").replace("\xa0", " ")
    return [rows.get(row, "").rstrip() for row in range(max(rows, default=-1) + 1)]
