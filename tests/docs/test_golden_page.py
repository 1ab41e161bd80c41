"""docs/golden.md shows what its commands print, three changes as a reviewer sees them."""

from __future__ import annotations

import importlib.util

from helpers import ROOT


def test_the_page_shows_what_the_commands_print():
    spec = importlib.util.spec_from_file_location("golden_page", ROOT / "docs/golden.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert text.count("\n$ gopt golden check") == 4 and script.page(text) == text, "python docs/golden.py writes it"
