"""Each environment variable that gopt reads stands in the docs."""

from __future__ import annotations

import ast
import re

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
    texts = {path: path.read_text() for path in FILES}
    looked_up = {path: keys(ast.parse(text)) for path, text in texts.items() if "environ" in text or "getenv" in text}
    names = {
        each.id for found in looked_up.values() for key in found for each in ast.walk(key) if isinstance(each, ast.Name)
    }
    assigned = re.compile(rf"^\s*({'|'.join(names | {'LAUNCHED'})})\b.* = ", re.MULTILINE)
    known: dict[str, list[str]] = {}
    for text in texts.values():
        if assigned.search(text):
            known |= constants(ast.parse(text))
    found: dict[str, str] = {}
    for path, expressions in looked_up.items():
        for key in expressions:
            if isinstance(key, ast.Constant):
                found[str(key.value)] = path.name
            else:
                names = {each.id for each in ast.walk(key) if isinstance(each, ast.Name)}
                values = [text for name in names for text in known.get(name, ())] or known.get("LAUNCHED", [])
                found |= dict.fromkeys(values, path.name)
    return found


def test_each_variable_stands_in_the_docs():
    found = read()
    assert {"GOPT_HEARTBEATS", "COLUMNS", "PMI_RANK"} <= found.keys()
    text = (ROOT / "docs/command-line.md").read_text()
    section = text.partition("## Environment variables")[2].partition("\n## ")[0]
    assert {name: file for name, file in found.items() if f"`{name}`" not in section} == {}
