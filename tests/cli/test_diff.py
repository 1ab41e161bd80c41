"""``gopt diff``: exit code 0 when equal, 1 when not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gopt.cli.diff import KINDS
from gopt.cli.main import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
ADAMW, EXTERNAL, SGD = (str(FIXTURES / f"{name}.onnx") for name in ("mlp_adamw", "mlp_adamw_external", "mlp_sgd"))


def test_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", ADAMW, EXTERNAL]) == 0
    assert capsys.readouterr().out == "equal\n"


def test_different(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
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


def test_summary_and_ignore(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", SGD, ADAMW, "--summary", "--ignore", "state"]) == 1
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("not equal")]
    assert " state" not in line and "bytes" in line
    kinds = [part for kind in KINDS for part in ("--ignore", kind)]
    assert main(["diff", SGD, ADAMW, *kinds]) == 0
