"""Each environment variable that gopt reads stands in the docs."""

from __future__ import annotations

import ast

import pytest
from helpers import ROOT

FILES = sorted(path for folder in ("gopt", "cli") for path in (ROOT / folder).rglob("*.py"))


def constants(tree: ast.AST) -> dict[str, list[str]]:
    """Names that a module gives to texts -> the texts."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            texts = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            found[node.targets[0].id] = [text for text in texts if isinstance(text, str)]
    return found


def environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def keys(tree: ast.AST) -> list[ast.expr]:
    """What is looked up in ``os.environ``, or in a copy of it that is passed on."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found += node.args[:1] if environment(node.func.value) or node.func.attr == "getenv" else []
        elif isinstance(node, ast.Compare) and environment(node.comparators[0]):
            found.append(node.left)
        elif isinstance(node, ast.Subscript) and environment(node.value):
            found.append(node.slice)
    return found


def read() -> dict[str, str]:
    """Environment variable -> a file that reads it."""
    known: dict[str, list[str]] = {}
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    for tree in trees.values():
        known |= constants(tree)
    found: dict[str, str] = {}
    for path, tree in trees.items():
        for key in keys(tree):
            if isinstance(key, ast.Constant):
                found[str(key.value)] = path.name
            else:
                names = [each.id for each in ast.walk(key) if isinstance(each, ast.Name)]
                texts = [text for name in names for text in known.get(name, ())] or known.get("LAUNCHED", [])
                found |= dict.fromkeys(texts, path.name)
    return found


READ = read()


def test_something_is_read():
    assert {"GOPT_HEARTBEATS", "COLUMNS", "PMI_RANK"} <= READ.keys()


@pytest.mark.parametrize("name", sorted(READ))
def test_a_variable_stands_in_the_docs(name):
    text = (ROOT / "docs/command-line.md").read_text()
    section = text.partition("## Environment variables")[2].partition("\n## ")[0]
    assert f"`{name}`" in section
