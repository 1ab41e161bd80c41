"""The table of packages in docs/architecture.md names every package and module of gopt, and nothing else."""

from __future__ import annotations

import re

from helpers import ROOT

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|", re.M)


def test_the_table_names_what_is_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = {name for row in ROW.findall(text) for name in re.findall(r"\w+", row)}
    found = [path for path in (ROOT / "gopt").iterdir() if path.suffix == ".py" or any(path.glob("*.[pj]*"))]
    assert named == {path.stem for path in found if not path.stem.startswith("__")} | {"cli"}
