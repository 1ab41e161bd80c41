"""docs/operators.md says what the cases of the operators are."""

from __future__ import annotations

import importlib.util

import pytest
from helpers import ROOT
from onnx import defs


def test_the_page_is_generated():
    spec = importlib.util.spec_from_file_location("operators_page", ROOT / "docs/operators.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    if defs.onnx_opset_version() < script.NEWEST:
        pytest.skip("an older onnx has fewer operators")
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page() == text, "python docs/operators.py writes it"
    assert "no rule" not in text
