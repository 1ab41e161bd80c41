"""Where gopt goes on after any error of a library, it does not go on after MemoryError: the result would depend on how
much memory there is."""

from __future__ import annotations

import ast

import pytest
from helpers import ROOT

FOLDERS = ("analysis", "artifact", "autodiff", "frontends/derive", "importers", "ir", "lower", "offline")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / "gopt" / folder).rglob("*.py"))


def taken(code: str) -> list[int]:
    """Lines of handlers that take any Exception where no handler before them has MemoryError."""
    found = []
    for node in ast.walk(ast.parse(code)):
        names: set[str] = set()
        for handler in node.handlers if isinstance(node, ast.Try) else ():
            kinds = ast.walk(handler.type) if handler.type is not None else [ast.Name("Exception")]
            mine = {each.id for each in kinds if isinstance(each, ast.Name)}
            if mine & {"Exception", "BaseException"} and "MemoryError" not in names and not _passed_on(handler):
                found.append(handler.lineno)
            names |= mine
    return found


def _passed_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "gopt")))
def test_too_little_memory_is_no_other_error(path):
    assert taken(path.read_text(encoding="utf-8")) == []


def test_what_is_found():
    assert taken("try: f()\nexcept Exception: pass") == [2]
    assert taken("try: f()\nexcept:\n  x = 1") == [2]
    assert taken("try: f()\nexcept BaseException:\n  undo()\n  raise") == []
    assert taken("try: f()\nexcept (MemoryError, InputError): raise\nexcept Exception: pass") == []
