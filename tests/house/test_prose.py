"""Docstrings of gopt and its command line begin with a subject or a verb; they and pages avoid phrases that are hard
to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (*sorted(path.parent for path in (ROOT / "gopt").glob("*/__init__.py")), ROOT / "gopt", ROOT / "cli")
"""Folders of the product; of the last two, the files in them alone."""
OPENING = re.compile(r"(What|Those|Who|Whose|Whoever|Whether|Of which)\b")
"""First words of a docstring that is a clause and no sentence: name the thing, or say what the function returns."""
PHRASES = re.compile(r"\b(nobody|awake|asleep|whoever|as ever|never guessed|when asked for|is made of what)\b", re.I)
UNNAMED = re.compile(r"\b(?:(?:[Tt]hat|[Tt]hose)\s+of|[Oo]f\s+which|(?:of|is|are)\s+none)\b")
"""Phrases that stand for a thing without its name, also where a line ends within one."""

WRITTEN_BY_CODE = ("api", "corpus", "formats", "operators", "options")
"""Pages of ``docs`` that a script there writes as a whole."""
PAGES = (
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem not in WRITTEN_BY_CODE),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "fixtures").rglob("README.md")),
)
CODE = re.compile(r"^ *(```+)[^`\n]*\n.*?^ *\1 *$|(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\2(?!`)", re.M | re.S)
"""A fenced block, or inline code within one paragraph."""


def docstrings(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text, and whether a function has it: no module, class, value or property."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None) if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                function = isinstance(node, ast.FunctionDef) and not node.decorator_list and body[0] is statement
                yield statement.lineno, value.value, function


def faults(text: str) -> list[str]:
    """Return one line for each docstring that breaks a rule. ``Whether`` may open the docstring of a value."""
    found = []
    for line, doc, function in docstrings(text):
        opening = OPENING.match(doc)
        if opening and (function or opening[1] != "Whether"):
            found.append(f"{line}: begins with {opening[1]!r}")
        phrases = (*PHRASES.finditer(doc), *UNNAMED.finditer(doc))
        found += [f"{line}: says {phrase[0]!r}" for phrase in phrases]
    return found


def sources(folder: Path) -> Iterable[Path]:
    return folder.glob("*.py") if folder in PACKAGES[-2:] else folder.rglob("*.py")


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_docstrings_are_plain(folder: Path) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{fault}" for path in sorted(sources(folder)) for fault in faults(path.read_text())
    ]
    assert found == []


def unnamed(text: str) -> list[str]:
    """Return line and words of each phrase in a page, outside of its code, that stands for a thing without its name."""
    prose = CODE.sub(lambda code: re.sub(r"[^\n]", ".", code[0]), text)
    return [f"{prose.count(chr(10), 0, hit.start()) + 1}: says {hit[0]!r}" for hit in UNNAMED.finditer(prose)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_things(page: Path) -> None:
    assert unnamed(page.read_text(encoding="utf-8")) == []


def test_finds_what_a_page_does_not_name() -> None:
    text = "It is that\nof the batch.\n\n```\nthose of\n```\n`is none`, three of which count.\n  ```\nof none\n  ```\n"
    assert unnamed(text) == ["1: says 'that\\nof'", "7: says 'of which'"]


def test_finds_dialect() -> None:
    text = '"""What trains."""\ndef f():\n    """Whether a dropout is awake."""\nX = 1\n"""Whether so."""\n'
    assert faults(text) == ["1: begins with 'What'", "3: begins with 'Whether'", "3: says 'awake'"]
    assert faults('"""The mean is that\nof the batch."""\n') == ["1: says 'that\\nof'"]
