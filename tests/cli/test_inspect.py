"""``gopt inspect``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES

import gopt


def test_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["inspect", str(FIXTURES / "mlp_adamw_fp16_scaler.onnx")]) == 0
    shown = capsys.readouterr().out
    for words in (
        "optimizer: AdamW for 4 parameters; beta1 0.9, beta2 0.999, eps 1e-06, weight decay 0.01",
        "finite check: logical_not_9 holds 12 states back",
        "loss scale: loss_scale, × 2 after 2000 good steps, × 0.5 after a bad one",
        "low precision: 4 parameters cast to float16, 4 gradients back",
        "float32[64,32]",
    ):
        assert words in shown


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.onnx")), ids=lambda path: path.stem)
def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["format"], record["what"], record["file"]) == ("gopt-inspection/1", "model", path.name)
    assert record["optimizers"] and record["parameters"]


def test_artifacts_that_make_no_step_are_not_sent_to_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(FIXTURES / "ort" / "mlp_adamw", tmp_path / "half")
    (folder / "optimizer_model.onnx").unlink()
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "not a training step" in shown and "no optimizer graph here" in shown
    assert (
        "gopt shard" not in shown and "next: gopt finds no part of a step in 'eval_model.onnx'; artifacts are" in shown
    )


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(FIXTURES / "mlp_sgd.onnx"), "--text"]) == 0
    golden = Path(__file__).parents[1] / "offline" / "golden" / "mlp_sgd.txt"
    assert capsys.readouterr().out == golden.read_text(encoding="utf-8")


def test_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = str(tmp_path / "out")
    assert main(["shard", str(FIXTURES / "mlp_adamw.onnx"), "--ranks", "3", "-o", out, "--json"]) == 0
    capsys.readouterr()
    assert main(["inspect", out]) == 0
    shown = capsys.readouterr().out
    assert "stage 2, mesh shard=3, flat partition, default buckets" in shown and "ReduceScatter" in shown
    rows = {line.split("  ")[0]: line.split()[-1] for line in shown.splitlines() if line.rstrip().endswith("%")}
    assert rows["optimizer states"] == "66%" and rows["nodes"] == "34%", shown
    assert main(["inspect", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"] == 3
    assert main(["inspect", out, "--text"]) == 0
    assert capsys.readouterr().out.count("gopt text 1\n") == 3


def test_roles(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(FIXTURES / "mlp_sgd.onnx")
    assert main(["inspect", model, "--loss", "loss", "--params", "fc1.bias=view_1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == "loss"
    assert main(["inspect", model, "--loss", "nothing"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["missing.onnx"], 3), (["."], 3), (["--json", "--text", "x.onnx"], 2), ([], 2), (["--what", "x.onnx"], 2)],
)
def test_refusals(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *arguments]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("gopt: error:") and not shown.out


def test_progress_counts_optimizers():
    told: list[tuple[str, int, int]] = []
    gopt.inspect(FIXTURES / "mlp_adamw.onnx", advance=lambda *each: told.append(each))
    assert [each[0] for each in told][:3] == ["reading", "reading the model", "finding roles"]
    assert [each[1:] for each in told if each[0] == "recognising optimizers"] == [(1, 4), (2, 4), (3, 4), (4, 4)]
