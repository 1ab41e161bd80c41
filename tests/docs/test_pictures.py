"""Pictures of terminals show what the commands print; all pictures are small, whole and need nothing from elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType
from xml.etree import ElementTree

import pytest
from helpers import ROOT

FOLDER = ROOT / "docs/pictures"
DRAWN = sorted(FOLDER.glob("*.svg"))
MOST = 1_500_000
"""Bytes of all pictures together."""


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts in docs, which import one another by name; afterwards their names are free again."""
    names = ("golden", "terminal_picture", "pictures", "recording")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        found = {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / "docs"))
    yield found
    for name in names:
        sys.modules.pop(name, None)


def _lines(scripts: dict[str, ModuleType], picture: str) -> list[str]:
    lines: list[str] = scripts["terminal_picture"].shown(picture)
    return lines


def _committed(name: str) -> str:
    return (FOLDER / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.rest
def test_pictures_show_what_the_commands_print_now(scripts: dict[str, ModuleType]) -> None:
    """Those that measure differ from run to run: their commands are compared, and that they fill a screen."""
    terminal = scripts["terminal_picture"]
    for screen in scripts["pictures"].SCREENS:
        shown = _lines(scripts, _committed(screen.name))
        if screen.measures:
            assert [line[2:] for line in shown if line.startswith("$ ")] == list(screen.commands)
            assert len(shown) > 10
        else:
            assert shown == _lines(scripts, terminal.svg(screen)), f"python docs/pictures.py {screen.name} draws it"


def test_a_picture_that_says_something_else_is_found(scripts: dict[str, ModuleType]) -> None:
    picture = _committed("diff")
    assert _lines(scripts, picture) != _lines(scripts, picture.replace("parameters", "parameterz"))


def test_the_recording_has_the_commands_of_the_readme(scripts: dict[str, ModuleType]) -> None:
    shown = _lines(scripts, _committed("five-minutes"))
    commands = scripts["recording"].commands()
    assert len(commands) > 5 and [line[2:] for line in shown if line.startswith("$ ")] == list(commands)


def test_every_line_of_a_recording_appears_once_its_command_has_run(scripts: dict[str, ModuleType]) -> None:
    from rich.text import Text

    recording, terminal = scripts["recording"], scripts["terminal_picture"]
    ran = [terminal.Ran("a", (Text("b"), Text("c")), 1.0), terminal.Ran("d", (), 0.1)]
    times = recording.timed(ran)
    assert times.appears == (0.5, 1.5, 1.5, 4.0, 4.0) and times.seconds > 4.0 + recording.END
    film = recording.film(ran)
    assert _lines(scripts, film) == ["$ a", "b", "c", "", "$ d"]
    assert film.count('attributeName="visibility"') == 4


def test_pictures_are_small_and_stand_on_a_page() -> None:
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert len(files) > 15 and sum(path.stat().st_size for path in files) < MOST
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [path.name for path in files if f"pictures/{path.name})" not in text] == []


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_needs_nothing_from_elsewhere(path) -> None:
    text = path.read_text(encoding="utf-8")
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert tags <= {"svg", "style", "text", "rect", "g", "circle", "clipPath", "animate", "animateTransform"}
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|@font-face|href=", text)


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_no_line_is_wider_than_its_picture(path) -> None:
    """A folder's name of the machine that drew it would stretch or overflow a line."""
    text = path.read_text(encoding="utf-8")
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', text)[1])  # type: ignore[index]
    for found in re.finditer(r' x="([\d.]+)"[^>]* textLength="([\d.]+)"', text):
        assert float(found[1]) + float(found[2]) <= width
    assert "/tmp" not in text
