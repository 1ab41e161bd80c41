"""What docs/parameter-server.md says of its drawing's tensors holds, and every option is on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import ROOT
from recipes import Recipe, build

import gopt

PAGE = (ROOT / "docs/parameter-server.md").read_text(encoding="utf-8")


def test_the_drawing_is_what_a_split_does(tmp_path: Path) -> None:
    (tmp_path / "step.onnx").write_bytes(build(Recipe(widths=(4, 6), direction=("momentum",))).SerializeToString())
    made = gopt.split(gopt.load(tmp_path / "step.onnx"), gopt.SplitOptions(trainers=2, servers=2, minimum=8))
    keys = [(key.server, [(p.tensor, p.start, p.stop) for p in key.pieces], key.shape) for key in made.step.keys]
    assert keys == [(0, [("b0", 0, 6), ("w0", 0, 12)], (18,)), (1, [("w0", 12, 24)], (12,))]


def test_every_option_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["split", "--help"]) == 0
    shared = {"--config", "--state", "--jobs", "--dry-run", "--force", "--json", "--help", "--quiet", "--shared",
              "--batch", "--states", "--params", "--loss", "--output", "--trainers", "--servers",
              "--verbose", "--reproducer", "--reproducer-values"}  # fmt: skip
    options = set(re.findall(r"^\s+(?:-\w, )?(--[a-z-]+)", capsys.readouterr().out, re.M)) - shared
    assert len(options) > 12 and [name for name in sorted(options) if f"`{name}" not in PAGE] == []
