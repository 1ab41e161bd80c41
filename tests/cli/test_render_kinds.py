"""``gopt inspect`` on anything: text and JSON of each kind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gopt.cli import render_kinds
from gopt.cli.main import main
from helpers import FIXTURES

sys.path.append(str(Path(__file__).parents[1] / "offline" / "kinds"))
import kind_files

CASES = {
    "inference": (kind_files.inference, "inference_model", "an inference model: "),
    "training_info": (kind_files.training_info, "training_info", "replaces 1 initializers: w <- w_new"),
    "ort_training": (kind_files.ort_training, "ort_training_model", "2 nodes of the forward, 2 of the backward"),
    "ort_optimizer": (kind_files.ort_optimizer, "ort_optimizer_model", "global-norm clip: max norm 1"),
    "ort_checkpoint": (kind_files.ort_checkpoint, "ort_checkpoint", "optimizer group group0: step 7"),
    "ort_artifacts": (kind_files.ort_artifacts, "ort_artifacts", "other models: eval_model.onnx"),
    "safetensors": (kind_files.safetensors, "values", "a safetensors file: 1 tensors (1 float32)"),
    "npz": (kind_files.npz, "values", "a npz file: 2 tensors"),
}


@pytest.mark.parametrize("case", CASES)
def test_text_and_json(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, what, words = CASES[case]
    path = str(make(tmp_path / "thing"))
    assert main(["inspect", path]) == 0
    assert words in capsys.readouterr().out
    assert main(["inspect", path, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["format"], record["what"]) == ("gopt-inspection/1", what)


def test_an_inference_model_says_how_to_get_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = kind_files.inference(tmp_path / "m.onnx")
    assert main(["inspect", str(path)]) == 0
    assert f"next: to train it: gopt derive {path} --loss cross-entropy" in capsys.readouterr().out


def test_files_of_gopt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["shard", str(FIXTURES / "mlp_sgd.onnx"), "--ranks", "2", "-o", str(out), "--json"]) == 0
    capsys.readouterr()
    for name, words in (
        ("rank_0001.onnx", "rank 1 of mesh shard=2"),
        ("manifest.json", "a manifest: mesh shard=2, 2 ranks, loss loss"),
        ("report.json", "a report: mlp_sgd.onnx on mesh shard=2"),
    ):
        assert main(["inspect", str(out / name)]) == 0
        assert words in capsys.readouterr().out


def test_other_files_and_damaged_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"GGUF" + bytes(40))
    assert main(["inspect", str(path)]) == 3
    assert "it looks like a GGUF file" in capsys.readouterr().err
    path.write_bytes((FIXTURES / "mlp_sgd.onnx").read_bytes()[:2000])
    assert main(["inspect", str(path)]) == 3
    assert "truncated or damaged" in capsys.readouterr().err


def test_a_role_by_hand_says_that_it_is_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who names states is told why there are none, and not that it is an inference model."""
    path = str(kind_files.inference(tmp_path / "m.onnx"))
    assert main(["inspect", path, "--loss", "y"]) != 0
    assert "inference model" not in capsys.readouterr().out


def test_each_kind_has_its_renderer() -> None:
    assert len(render_kinds._RENDERERS) == 15
