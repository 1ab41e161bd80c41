"""docs/api.md is what the docstrings say."""

from __future__ import annotations

from helpers import script_of

import gopt


def test_the_page_is_that_of_the_docstrings():
    script = script_of("docs/api.py")
    assert script.page() == script.PAGE.read_text(encoding="utf-8"), "python docs/api.py writes it"
    assert {*script.VERBS, *script.OPTIONS, *script.OBJECTS, *script.ERRORS} == {*gopt.__all__} - {"__version__"}
