"""``gopt diff``: exit code 0 when equal, 1 when not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from gopt.cli.diff import KINDS
from gopt.cli.main import main

import gopt

FIXTURES = Path(__file__).parents[2] / "fixtures"
ADAMW, EXTERNAL, SGD = (str(FIXTURES / f"{name}.onnx") for name in ("mlp_adamw", "mlp_adamw_external", "mlp_sgd"))


def test_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", ADAMW, EXTERNAL]) == 0
    assert capsys.readouterr().out == "equal\n"


def test_different(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["diff", SGD, ADAMW, "--full"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert "bytes optimizer_state: 0 -> 22096 (+22096)" in shown
    assert shown[-1].startswith(f"not equal: {len(shown) - 2} differences (")
    assert "9 state" in shown[-1]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", SGD, ADAMW, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "gopt-diff/1" and not record["equal"]
    assert sum(record["counts"].values()) == len(record["lines"])


@pytest.mark.parametrize(
    ("arguments", "code"), [([SGD, "missing.onnx"], 3), ([SGD, "."], 2), ([".", "."], 3), ([SGD], 2)]
)
def test_refusals(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diff", *arguments]) == code
    assert capsys.readouterr().err.startswith("gopt: error:")


def test_short_and_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables with few rows, the cause first; ``--full``: every difference too; ``--markdown``: a comment."""
    from helpers import source

    for name, ranks in (("a", 2), ("b", 3)):
        gopt.shard(source("mlp_adamw"), ranks).write(tmp_path / name)
    both = [str(tmp_path / name) for name in "ab"]
    capsys.readouterr()
    assert main(["diff", *both]) == 1
    short = capsys.readouterr().out.splitlines()
    assert short[0] == "Cause" and short[2].split() == ["mesh", "shard=2", "shard=3"] and len(short) < 80
    assert not any(line.startswith("rank 0") for line in short)
    assert main(["diff", *both, "--full"]) == 1
    full = capsys.readouterr().out.splitlines()
    assert full[0] == "Cause" and not any("--full" in line for line in full)
    assert any(line.startswith("rank 0") for line in full)
    assert main(["diff", *both, "--markdown"]) == 1
    assert capsys.readouterr().out.startswith("### gopt diff: not equal")


def test_a_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of values that differ the worst is first; none is told within a tolerance."""
    model = onnx.load(ADAMW)
    for name, by in (("fc1.bias", 1.001), ("fc1.weight", 1.01)):
        held = next(each for each in model.graph.initializer if each.name == name)
        held.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(held) * np.float32(by), name))
    onnx.save(model, tmp_path / "b.onnx")
    both = [ADAMW, str(tmp_path / "b.onnx")]
    assert main(["diff", *both]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["%fc1.weight:", "%fc1.bias:"]
    assert "relative 0.0099" in lines[1]
    assert main(["diff", *both, "--rtol", "0.005"]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "fc1.bias" in line] == []
    assert main(["diff", *both, "--rtol", "0.05"]) == 0


def test_summary_and_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", SGD, ADAMW, "--summary", "--ignore", "state"]) == 1
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("not equal")]
    assert " state" not in line and "bytes" in line
    kinds = [part for kind in KINDS for part in ("--ignore", kind)]
    assert main(["diff", SGD, ADAMW, *kinds]) == 0
