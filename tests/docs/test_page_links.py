"""Every relative link of the README, the docs and their neighbours leads to a file and a heading that exist."""

from __future__ import annotations

import re
from pathlib import Path

import markdown_links
import pytest
from helpers import ROOT

DOCS = ROOT / "docs"
FILES = re.compile(r"`((?:tests|benchmarks)/[a-z0-9_/]+\.py)`")
"""Code spans that are a script of the repository."""
MADE_UP = frozenset({"tests/a/test_b.py", "tests/cli/test_x.py"})
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md", "fixtures/README.md")),
    *sorted(DOCS.glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert markdown_links.broken(ROOT, [page]) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_scripts_that_pages_name_are_there(page: Path) -> None:
    """Pages name tests and benchmarks by their paths."""
    named = FILES.findall(page.read_text(encoding="utf-8"))
    assert [name for name in named if name not in MADE_UP and not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index() -> None:
    """The site's navigation is read from docs/index.md: a page that is not in it has no place."""
    listed = markdown_links.links((DOCS / "index.md").read_text(encoding="utf-8"))
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert sorted(pages - set(listed)) == [], "add a line to docs/index.md, under the heading of the page's purpose"
    assert "docs/index.md" in markdown_links.links((ROOT / "README.md").read_text(encoding="utf-8"))


def test_no_picture_is_left_over() -> None:
    used = {target for page in PAGES for target in markdown_links.links(page.read_text(encoding="utf-8"))}
    names = {Path(target).name for target in used}
    assert [path.name for path in sorted(DOCS.glob("*.[sp][vn]g")) if path.name not in names] == []


def test_the_check_finds_what_is_broken(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`: c\n## A b c\n[x](#a-b-c) [x](#a-b-c-1) [x](#b) [y](gone.md) ![z](gone.svg) `[q](gone)`\n[w](../..)\n"
    )
    found = [(each.target, each.why) for each in markdown_links.broken(tmp_path, [page])]
    assert found == [
        ("#b", "no such heading"),
        ("gone.md", "no such file"),
        ("gone.svg", "no such file"),
        ("../..", "no such file"),
    ]


def test_headings_become_the_anchors_of_github() -> None:
    text = "# `gopt run`: a_b [c](d)\n```\n# no heading\n```\n## Two — words\n## Two — words\n"
    assert markdown_links.anchors(text) == {"gopt-run-a_b-c", "two--words", "two--words-1"}
