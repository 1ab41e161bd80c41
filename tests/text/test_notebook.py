"""Results as HTML: what comes from files is text there, never markup."""

from __future__ import annotations

from dataclasses import replace

from helpers import source

from gopt.offline.explain.story import Fact, Story
from gopt.text.notebook import ROWS, html_table

HOSTILE = '<img src=x onerror="alert(1)">\x1b[31m\u202e'


def test_hostile_names_are_escaped():
    story = Story(HOSTILE, HOSTILE, HOSTILE, (Fact("a", HOSTILE),))
    for html in (story._repr_html_(), replace(source("mlp_sgd"), name=HOSTILE)._repr_html_()):
        assert "<img" not in html and "\x1b" not in html and "\u202e" not in html
        assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;" in html


def test_long_tables_are_cut():
    html = html_table("t", ((str(number), number) for number in range(ROWS + 3)))
    assert html.count("<tr>") == ROWS + 1 and "3 more" in html


def test_collections_are_short():
    html = html_table("t", [("few", [1, 2]), ("many", list(range(9))), ("named", {"a": 1}), ("none", None)])
    assert "<td>1, 2</td>" in html and "<td>9 items</td>" in html and "<td>a 1</td>" in html and "<td></td>" in html
