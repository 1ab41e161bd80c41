"""The pictures of docs/ are what docs/drawings.py draws."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from helpers import ROOT, script_of

SCRIPT = script_of("docs/drawings.py")


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
