"""A condition of a comprehension makes no set of whole mappings: Python makes it again for each element, and
time grows with the square of a step's size."""

from __future__ import annotations

import ast

import pytest
from helpers import ROOT


def made_again(code: str) -> list[int]:
    """Lines of comprehensions with a set of the elements of others in a condition."""
    comprehensions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.comprehension)]
    inside = (node for comprehension in comprehensions for test in comprehension.ifs for node in ast.walk(test))
    sets = (node for node in inside if isinstance(node, ast.Set))
    return [node.lineno for node in sets if any(isinstance(element, ast.Starred) for element in node.elts)]


@pytest.mark.rest
def test_no_condition_makes_a_set_for_each_element():
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in (ROOT / "gopt").rglob("*.py")}
    assert {path: lines for path, code in files.items() if (lines := made_again(code))} == {}


def test_what_is_found():
    assert made_again("a = [x for x in y if x not in {*b, *c}]") == [1]
    assert made_again("d = {*b, *c}\na = [x for x in y if x not in d]") == []
