"""docs/golden.md shows what its commands print, three changes as a reviewer sees them."""

from __future__ import annotations

from helpers import script_of


def test_the_page_shows_what_the_commands_print():
    script = script_of("docs/golden.py")
    text = script.PAGE.read_text(encoding="utf-8")
    assert text.count("\n$ gopt golden check") == 4 and script.page(text) == text, "python docs/golden.py writes it"
