"""The pictures of docs/ are what docs/drawings.py draws."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from xml.etree import ElementTree

import pytest
from helpers import ROOT


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs/drawings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["drawings"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@pytest.mark.parametrize("name", SCRIPT.DRAWINGS)
def test_a_picture_is_up_to_date(name: str) -> None:
    drawn = SCRIPT.DRAWINGS[name]().svg()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == drawn, "run python docs/drawings.py"


@pytest.mark.parametrize("name", SCRIPT.DRAWINGS)
def test_a_picture_needs_nothing_from_elsewhere(name: str) -> None:
    root = ElementTree.fromstring((ROOT / "docs" / name).read_text(encoding="utf-8"))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "rect", "text", "line", "style"}
    assert not [key for element in root.iter() for key in element.attrib if key.endswith("href")]
