"""docs/api.md is what the docstrings say."""

from __future__ import annotations

import importlib.util

from helpers import ROOT

import gopt


def test_the_page_is_that_of_the_docstrings():
    spec = importlib.util.spec_from_file_location("api_page", ROOT / "docs/api.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == script.PAGE.read_text(encoding="utf-8"), "python docs/api.py writes it"
    assert {*script.VERBS, *script.OPTIONS, *script.OBJECTS, *script.ERRORS} == {*gopt.__all__} - {"__version__"}
