"""docs/operators.md says what the cases of the operators are."""

from __future__ import annotations

import re

import pytest
from helpers import ROOT, script_of
from onnx import defs
from operator_cases import CASES

from gopt.autodiff import refusals


def test_the_page_is_generated():
    script = script_of("docs/operators.py")
    if defs.onnx_opset_version() < script.NEWEST:
        pytest.skip("an older onnx has fewer operators")
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page() == text, "python docs/operators.py writes it"
    assert "no rule" not in text


def test_the_page_of_derive_lists_what_is_refused():
    """By operator: in every case of it, or in some."""
    text = (ROOT / "docs/derive.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip(): row.split("|")[2] for row in text.splitlines() if row.count("|") >= 3}
    refused = {case.operator for case in CASES if case.refused}
    taken = {case.operator for case in CASES if not case.refused}
    assert rows["operators"].strip() == ", ".join(sorted(refused - taken))
    assert rows["variants of operators ([which](operators.md))"].strip() == ", ".join(sorted(refused & taken))
    others = re.findall(r"`([\w.]+)\.(\w+)`", rows["operators of other domains"])
    assert set(others) == refusals._SAME


def test_the_page_of_derive_says_how_many_operators_the_library_has():
    rules = pytest.importorskip("onnx_ad.rules")
    said = re.search(r"onnx-ad differentiates (\d+) operators", (ROOT / "docs/derive.md").read_text(encoding="utf-8"))
    assert said is not None and int(said[1]) <= len(rules.REVERSE)
