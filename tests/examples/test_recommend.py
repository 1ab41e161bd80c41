"""The example with tables on servers: the same curve as whole gradients on ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

SCRIPT = ROOT / "examples/recommend.py"


def run(out: Path, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(script), "--rows", "64,40,24", "--steps", "4", "--out", str(out)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, encoding="utf-8")


@pytest.mark.rest
def test_the_curves_agree(tmp_path: Path) -> None:
    done = run(tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same curve" in done.stdout and "--table '*=modulo'" in done.stdout


def test_a_folder_of_others_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("done")
    done = run(tmp_path)
    assert done.returncode == 2 and "exists already" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
