"""A test file alone finds what it imports: helpers of ``tests/`` and of its own folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

TESTS = ROOT / "tests"


def strangers(path: Path, homes: dict[str, set[Path]]) -> Iterator[str]:
    """Modules that a file imports from another folder's helpers, found only where pytest was there first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if "sys.path" in {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}:
        return
    reached = {path.parent, *path.parents}
    for node in ast.walk(tree):
        modules = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for module in modules:
            if not homes.get(module.split(".")[0], reached) & reached:
                yield f"{path.relative_to(TESTS)} imports {module}"


@pytest.mark.rest
def test_a_test_imports_helpers_of_its_own_folder_or_of_all_tests():
    files = sorted(TESTS.rglob("*.py"))
    homes: dict[str, set[Path]] = {}
    for path in files:
        homes.setdefault(path.stem, set()).add(path.parent)
    told = [path.parent for path in files if path.name == "conftest.py" and "sys.path" in path.read_text("utf-8")]
    checked = [path for path in files if not any(folder in path.parents for folder in told)]
    assert [line for path in checked for line in strangers(path, homes)] == []
