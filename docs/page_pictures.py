"""Take the pictures of pages in Chromium: ``python docs/page_pictures.py [NAME ...]``; a minute.

``tests/browser/chromium.sh`` finds Chromium, or installs it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
BROWSER = HERE.parent / "tests/browser"
sys.path[:0] = [str(HERE), str(BROWSER)]
from browser import Browser, Page  # noqa: E402
from markdown_it import MarkdownIt  # noqa: E402
from terminal_picture import printed, workplace  # noqa: E402

import gopt  # noqa: E402

FOLDER = HERE / "pictures"
MODEL = HERE.parent / "fixtures/gpt_adamw.onnx"
_STYLE = """\
body { font: 14px/1.5 sans-serif; color: #1f2328; background: #fff; margin: 16px; }
h3 { margin-top: 0; }
table { border-collapse: collapse; margin: 8px 0; }
td, th { border: 1px solid #d1d9e0; padding: 4px 10px; text-align: left; }
code { font: 12px monospace; background: #f0f1f2; border-radius: 4px; padding: 2px 4px; }
details { margin: 8px 0; }
"""
_NOTEBOOK = """\
table { font-size: 12px; margin: 4px 0 12px 70px; }
caption { text-align: left; font: 12px monospace; padding-bottom: 4px; }
td, th { border: 0; padding: 2px 10px; text-align: right; }
tr:nth-child(odd) { background: #f5f5f5; }
pre { font: 13px monospace; background: #f7f7f7; border: 1px solid #e0e0e0; margin: 4px 0 4px 70px; padding: 6px; }
pre::before { content: attr(title); position: absolute; left: 16px; color: #303f9f; }
"""
_CELLS = (
    'source = gopt.load("gpt_adamw.onnx")\nsource',
    "sharded = gopt.shard(source, 4, stage=2)\nsharded",
    'sharded.write("gpt.ranks")\ngopt.verify("gpt.ranks", steps=1)',
)


@dataclass(frozen=True, slots=True)
class Shot:
    """A picture of a page."""

    name: str
    make: Callable[[], str]
    """The page, from what it makes in the current folder."""
    until: str = ""
    """The id of the element that the picture ends above; else the whole page is on it."""
    dark: bool = False
    width: int = 1180


def report(mesh: str) -> str:
    """The page of a GPT on a mesh, with its proof where there are few ranks."""
    shutil.copy(MODEL, "gpt_adamw.onnx")
    printed(f"gopt shard gpt_adamw.onnx --mesh {mesh} -o gpt.ranks -q")
    told: tuple[str, ...] = ()
    if gopt.Mesh.parse(mesh).ranks <= 8:
        proof = printed("gopt verify gpt.ranks --steps 1 --json")
        json.loads(proof)
        Path("proof.json").write_text(proof, encoding="utf-8")
        told = ("--verification proof.json",)
    printed(" ".join(["gopt report gpt.ranks --html page.html -q", *told]))
    return Path("page.html").read_text(encoding="utf-8")


def comment() -> str:
    """``gopt diff --markdown`` as a pull request shows it, its first fold open."""
    shutil.copy(MODEL, "gpt_adamw.onnx")
    printed("gopt shard gpt_adamw.onnx --ranks 8 -o before.ranks -q")
    printed("gopt shard gpt_adamw.onnx --ranks 8 --stage 3 -o after.ranks -q")
    text = printed("gopt diff before.ranks after.ranks --markdown")
    body = MarkdownIt("commonmark").enable("table").render(text).replace("<details>", "<details open>", 1)
    return f"<!doctype html><meta charset=utf-8><style>{_STYLE}</style>{body}"


def notebook() -> str:
    """Results as a notebook shows them."""
    shutil.copy(MODEL, "gpt_adamw.onnx")
    scope: dict[str, object] = {"gopt": gopt}
    body = '<pre title="In [1]:">import gopt</pre>'
    for number, cell in enumerate(_CELLS, start=2):
        code, _, last = cell.rpartition("\n")
        exec(code, scope)
        shown = eval(last, scope)._repr_html_()
        body += f'<pre title="In [{number}]:">{escape(cell)}</pre>{shown}'
    return f"<!doctype html><meta charset=utf-8><style>{_STYLE}{_NOTEBOOK}</style>{body}"


SHOTS = (
    Shot("report-page", lambda: report("dp=2,shard=2,tp=2"), "operators"),
    Shot("report-page-dark", lambda: report("dp=2,shard=2,tp=2"), "traffic", dark=True),
    Shot("report-page-1", lambda: report("shard=1"), "timeline"),
    Shot("report-page-1024", lambda: report("dp=64,shard=8,tp=2"), "timeline"),
    Shot("diff-markdown", comment, width=900),
    Shot("notebook", notebook, width=900),
)


def take(shot: Shot, browser: Browser) -> bytes:
    """One picture, as WebP."""
    with workplace(100):
        text = shot.make()
        page = Path("picture.html")
        page.write_text(text, encoding="utf-8")
        shown = Page(browser, page, dark=shot.dark, width=shot.width, height=600)
        end = f"document.getElementById('{shot.until}').getBoundingClientRect().top + scrollY"
        height = shown.run(end if shot.until else "document.documentElement.getBoundingClientRect().height + 16")
        clip = {"x": 0, "y": 0, "width": shot.width, "height": height, "scale": 1}
        picture = shown.picture(clip=clip)
        shown.close()
    return picture


def make(names: list[str]) -> None:
    """Take these pictures; all where none is named."""
    path = subprocess.run([BROWSER / "chromium.sh"], capture_output=True, text=True, check=True).stdout.split()[0]
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(path, Path(profile))
        try:
            for shot in SHOTS:
                if not names or shot.name in names:
                    (FOLDER / f"{shot.name}.webp").write_bytes(take(shot, browser))
        finally:
            browser.close()


if __name__ == "__main__":
    make(sys.argv[1:])
