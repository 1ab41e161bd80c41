"""The table of packages in docs/architecture.md names every package of gopt, and no module that is not there."""

from __future__ import annotations

import re

from helpers import ROOT

ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|", re.M)


def test_the_table_names_what_is_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = {name for row in ROW.findall(text) for name in re.findall(r"\w+", row)}
    found = [path for path in (ROOT / "gopt").iterdir() if path.suffix == ".py" or any(path.glob("*.[pj]*"))]
    assert named == {path.stem for path in found if not path.stem.startswith("__")} | {"cli"}


def test_the_modules_of_a_row_are_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    missing = []
    for packages, about in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", text, re.M):
        roots = [ROOT / "cli" if name == "cli" else ROOT / "gopt" / name for name in re.findall(r"\w+", packages)]
        there = {path.stem for root in roots if root.is_dir() for path in root.rglob("*")}
        named = re.findall(r"`([a-z][a-z_]*)`", about)
        if any(root.is_dir() for root in roots):
            missing += [f"{packages}: {name}" for name in named if name not in there | {root.name for root in roots}]
    assert missing == []
