"""docs/report.md shows what its commands print."""

from __future__ import annotations

from helpers import script_of


def test_the_page_shows_what_the_commands_print():
    script = script_of("docs/report.py")
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "python docs/report.py writes it"
