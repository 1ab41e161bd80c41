"""The shipped examples, as a newcomer runs them: the same loss curve however many ranks share the work."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from products import part

EXAMPLES = ROOT / "examples"
ROUNDING = 1e-5
"""Of a loss, over the few steps that are tried here: float32 sums in another order. Other data is 1e-1 off."""


def missing(*modules: str) -> bool:
    return any(importlib.util.find_spec(module) is None for module in modules)


pytestmark = pytest.mark.skipif(missing("plotext", "sklearn"), reason="needs pip install 'gopt[examples]'")


def run(example: str, out: Path, *more: str, script: Path = EXAMPLES / "train.py") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(script), example, "--out", str(out), *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, encoding="utf-8")


def curve(out: Path, layout: int | str) -> np.ndarray:
    return np.array([json.loads(line)["loss"] for line in (out / f"{layout}.jsonl").read_text().splitlines()])


STEPS = {"digits": 20, "gpt": 8}


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The first example on 1 and 4 ranks, trained once for all tests."""
    out = tmp_path_factory.mktemp("digits") / "out"
    return out, run("digits", out, "--steps", str(STEPS["digits"]), "--ranks", "1", "4")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("example", "counts", "falls"), part([("digits", (1, 4), 0.5), ("gpt", (1, 4, "cp=2,tp=2"), 0.9)], 1)
)
def test_the_curves_agree_and_the_loss_falls(example, counts, falls, digits, tmp_path):
    steps = STEPS[example]
    if example == "digits":
        out, done = digits
    else:
        out, (*ranks, mesh) = tmp_path / "out", map(str, counts)
        done = run(example, out, "--steps", str(steps), "--ranks", *ranks, "--mesh", mesh)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *others = (curve(out, ranks) for ranks in counts)
    assert len(first) == steps
    for other in others:
        np.testing.assert_allclose(other, first, rtol=ROUNDING)
    assert first[-2:].mean() < falls * first[:2].mean()
    judged = [line.partition(": ")[2] for line in done.stdout.splitlines() if ", merged: " in line]
    assert len(judged) == len(counts) and len(set(judged)) == 1, "trained alike, judged alike"
    assert done.stdout.count("the same curve") == len(counts) - 1
    titles = [each if isinstance(each, str) else f"{each} rank{'s' * (each > 1)}" for each in counts]
    assert all(f"{title}, loss by step" in done.stdout for title in titles)


@pytest.mark.slow
@pytest.mark.skipif(missing("mpi4py"), reason="needs pip install 'gopt[mpi]'")
def test_processes_train_as_threads_do(digits, tmp_path):
    done = run("digits", tmp_path / "mpi", "--engine", "mpi", "--ranks", "2", "--steps", str(STEPS["digits"]))
    assert done.returncode == 0, done.stdout + done.stderr
    np.testing.assert_allclose(curve(tmp_path / "mpi", 2), curve(digits[0], 1), rtol=ROUNDING)


@pytest.mark.slow
def test_other_data_is_another_curve(tmp_path):
    """Ranks that all see the same batches: the example says so, and fails."""
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    module = tmp_path / "examples" / "digits.py"
    text = module.read_text(encoding="utf-8")
    assert "itertools.count(part, parts)" in text
    module.write_text(text.replace("itertools.count(part, parts)", "itertools.count()"), encoding="utf-8")
    script = tmp_path / "examples" / "train.py"
    done = run("digits", tmp_path / "out", "--ranks", "1", "2", "--steps", "4", script=script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ANOTHER CURVE" in done.stdout
    gap = np.abs(curve(tmp_path / "out", 2) / curve(tmp_path / "out", 1) - 1)
    assert gap.max() > 1000 * ROUNDING


@pytest.mark.parametrize("more", [(), ("--force",)])
def test_a_folder_of_others_stays(more, tmp_path):
    (tmp_path / "thesis.txt").write_text("done")
    done = run("digits", tmp_path, *more)
    assert done.returncode == 2 and "exists already" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
