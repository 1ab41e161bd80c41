"""Exporting again gives the same step. Needs PyTorch and transformers; run by hand:
``TORCH_PYTHON=/path/to/python pytest -m torch tests/real`` where that python has them, and gopt."""

from __future__ import annotations

import os
import subprocess
import sys

import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, op_counts

REAL = FIXTURES / "real"
WRITER = "2.13."
"""The version of PyTorch that wrote the committed files: others may take a norm apart into other operators."""
NAMES = sorted(path.stem for path in REAL.glob("*.onnx") if not path.stem.endswith("_random"))


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_the_export_gives_what_is_committed(name, tmp_path):
    """Both files are compared with eager PyTorch of this version, over three steps."""
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    build = [python, str(REAL / "build.py"), "-o", str(tmp_path), "--beside", str(REAL), name]
    subprocess.run(build, check=True, timeout=500)
    new, old = onnx.load(tmp_path / f"{name}.onnx"), onnx.load(REAL / f"{name}.onnx")
    assert [each.name for each in new.graph.input] == [each.name for each in old.graph.input]
    assert [each.name for each in new.graph.output] == [each.name for each in old.graph.output]
    version = "from importlib.metadata import version; print(version('torch'))"
    if subprocess.check_output([python, "-c", version], text=True).startswith(WRITER):
        assert op_counts(new) == op_counts(old)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["gpt2", "vit", "convnext", "clip", "t5_adamw", "roberta", "swin", "bart"])
def test_other_families_are_exported_and_proven(name, tmp_path):
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    subprocess.run([python, str(REAL / "build.py"), "-o", str(tmp_path), name], check=True, timeout=500)
    for stage, ranks in ((1, 2), (3, 3)):
        out = str(tmp_path / f"{stage}")
        file = str(tmp_path / f"{name}.onnx")
        assert main(["shard", file, "--ranks", str(ranks), "--stage", str(stage), "-o", out]) == 0
        assert main(["verify", out]) == 0
