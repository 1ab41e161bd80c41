"""The examples of docs/parameter-server.md run, and what it says of the drawing's tensors holds."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, ROOT
from recipes import Recipe, build

import gopt

PAGE = (ROOT / "docs/parameter-server.md").read_text(encoding="utf-8")


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "mlp_adamw.onnx", "step.onnx")
    rng = np.random.default_rng(0)
    np.savez("samples.npz", x=rng.standard_normal((64, 32)).astype("f4"), y=rng.integers(0, 10, 64))
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.S)
    lines = block.strip().splitlines()
    assert len(lines) > 4
    for line in lines:
        command = shlex.split(line)[1:]
        assert main(command) == 0, line
    assert Path("more.split/server_0002.onnx").is_file() and Path("trained.onnx").is_file()


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
