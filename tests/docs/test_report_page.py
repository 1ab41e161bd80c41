"""docs/report.md shows what its commands print."""

from __future__ import annotations

import importlib.util

from helpers import ROOT


def test_the_page_shows_what_the_commands_print():
    spec = importlib.util.spec_from_file_location("report_page", ROOT / "docs/report.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "python docs/report.py writes it"
