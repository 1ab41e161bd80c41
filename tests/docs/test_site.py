"""The site: its navigation has every page, it is built strictly, and its links lead somewhere without a network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from helpers import ROOT, script_of

HOOK = script_of("docs/navigation.py")


def test_the_navigation_has_every_page_once() -> None:
    sections = HOOK.navigation((ROOT / "docs/index.md").read_text(encoding="utf-8"))
    names = [name for section in sections for pages in section.values() for page in pages for name in page.values()]
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(names) == sorted(pages | {HOOK.site_name(f"../{name}") for name in HOOK.OUTSIDE})
    assert len(sections) == 6


def test_links_of_pages_outside_of_docs_are_rebased() -> None:
    text = "[a](../docs/running.md#x) [b](train.py) [c](https://x.y) [d](#e)"
    assert HOOK.from_docs("examples/README.md", text) == (
        "[a](running.md#x) [b](../examples/train.py) [c](https://x.y) [d](#e)"
    )
    assert HOOK.from_docs("README.md", "[a](docs/plan.md) [b](examples/README.md)") == (
        "[a](plan.md) [b](../examples/README.md)"
    )


def test_links_out_of_docs_lead_to_pages_or_name_the_file() -> None:
    text = "[a](../examples/README.md#x) and [b](../fixtures/build.py)"
    assert HOOK.on_page_markdown(text) == "[a](examples-readme.md#x) and b (`fixtures/build.py` in the repository)"


class _Links(HTMLParser):
    """Targets and anchors of an HTML page, and what its display needs from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.remote: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        target = values.get("href") or values.get("src")
        if not target:
            return
        if urlsplit(target).scheme or target.startswith("//"):
            if tag in ("script", "img", "iframe") or (tag == "link" and values.get("rel") != "canonical"):
                self.remote.append(target)
        else:
            self.targets.append(target)


def broken(site: Path) -> list[tuple[str, str]]:
    """Links of a built site to files or anchors that are not in it, and what it would fetch."""
    pages: dict[Path, _Links] = {}
    for path in site.rglob("*.html"):
        pages[path] = _Links()
        pages[path].feed(path.read_text(encoding="utf-8"))
    found = []
    for path, page in pages.items():
        found += [(path.name, target) for target in page.remote]
        if path.name == "404.html":  # its links count from the root of a server
            continue
        for target in page.targets:
            parts = urlsplit(target)
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            anchor = unquote(parts.fragment)
            if not file.is_file() or (anchor and file in pages and anchor not in pages[file].anchors | {"__search"}):
                found.append((path.name, target))
    return found


def test_the_check_of_the_site_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="x"><a href="#x"><a href="#y"><a href="b.html"><img src="https://z/p.png">'
    )
    assert broken(tmp_path) == [("a.html", "https://z/p.png"), ("a.html", "#y"), ("a.html", "b.html")]


needs_generator = pytest.mark.skipif(
    importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs-material is not installed: pip install 'gopt[test]' brings it",
)


@pytest.mark.rest
@needs_generator
def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=quiet)
    assert done.returncode == 0, done.stderr
    assert broken(tmp_path / "site") == []
    assert (tmp_path / "site/tutorial.html").is_file() and (tmp_path / "site/bucket.svg").is_file()
    assert (tmp_path / "site/pictures/five-minutes.svg").is_file()
