"""``gopt import``, and folders of artifacts given to other commands: what is printed, and how damage is refused."""

from __future__ import annotations

import json

import pytest
from gopt.cli.main import main
from recordings import FOLDERS, copied

from gopt.artifact.manifest_check import read_manifest


def test_the_step_alone_is_what_shard_reads_of_the_folder(tmp_path, capsys):
    step, folder = tmp_path / "step.onnx", FOLDERS / "mlp_clip"
    assert main(["import", str(folder), "-o", str(step)]) == 0
    printed = capsys.readouterr().out
    assert "208 nodes, 6 parameters, 19 states" in printed and "inputs: input, target, learning_rate" in printed
    assert main(["diff", str(step), str(folder)]) == 0
    for source, place in ((step, "a"), (folder, "b")):
        assert main(["shard", str(source), "--ranks", "2", "-o", str(tmp_path / place), "-q"]) == 0
    for file in ("rank_0000.onnx", "rank_0001.onnx", "states.bin", "source.onnx"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    first, second = (read_manifest(tmp_path / place)[0] for place in "ab")
    assert first.digest() == second.digest()
    assert main(["verify", str(folder), str(tmp_path / "a"), "-q", "--steps", "1"]) == 0


def test_the_record_and_the_target(tmp_path, capsys):
    step = tmp_path / "step.onnx"
    assert main(["import", str(FOLDERS / "mlp_sgd"), "-o", str(step), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "gopt-import/1" and record["states"] == 6 and record["missing"] == []
    assert main(["import", str(FOLDERS / "mlp_sgd"), "-o", str(step)]) == 2
    assert main(["import", str(FOLDERS / "mlp_sgd"), "-o", str(step), "--force", "-q"]) == 0
    assert main(["import", str(step), "-o", str(tmp_path / "other.onnx")]) == 2
    assert "is a plain graph already" in capsys.readouterr().err


def test_inspect_shows_parts_and_step(capsys):
    assert main(["inspect", str(FOLDERS / "cnn")]) == 0
    text = capsys.readouterr().out
    assert "7 accumulators of gradients" in text and "optimizer: Adam for 7 parameters" in text
    assert main(["inspect", str(FOLDERS / "cnn"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["what"] == "ort_artifacts" and record["step"]["loss"] == record["training"]["loss"]
    assert main(["inspect", str(FOLDERS / "cnn"), "--text"]) == 0
    assert capsys.readouterr().out.startswith("gopt text 1\n")


@pytest.mark.parametrize("command", [["shard", "--ranks", "2"], ["import", "-o", "s.onnx"], ["plan", "--ranks", "2"]])
@pytest.mark.parametrize("file", ["training_model.onnx", "optimizer_model.onnx", "checkpoint"])
@pytest.mark.parametrize("size", [0, 9, 300])
def test_damaged_parts_are_refused_in_one_line(command, file, size, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copied("mlp_adamw", tmp_path)
    (folder / file).write_bytes((folder / file).read_bytes()[:size])
    assert main([command[0], str(folder), *command[1:]]) == 3
    error = capsys.readouterr().err.splitlines()
    assert error[0].startswith("gopt: error:") and sum("error" in line for line in error) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mlp_adamw"]


def test_a_folder_without_a_step_says_so_when_inspected(tmp_path, capsys):
    folder = copied("mlp_adamw", tmp_path)
    (folder / "checkpoint").unlink()
    assert main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "not a training step:" in text and "no checkpoint here" in text
    assert main(["shard", str(folder), "--ranks", "2", "-o", str(tmp_path / "out")]) == 3
    assert "no checkpoint here" in capsys.readouterr().err


def test_an_operator_without_a_record_is_refused_by_name(tmp_path, capsys):
    import onnx

    folder = copied("mlp_adamw", tmp_path)
    model = onnx.load(folder / "training_model.onnx")
    next(node for node in model.graph.node if node.op_type == "ReluGrad").op_type = "EluGrad"
    onnx.save(model, folder / "training_model.onnx")
    assert main(["shard", str(folder), "--ranks", "2", "-o", str(tmp_path / "out")]) == 4
    assert "operator 'com.microsoft.EluGrad' of node" in capsys.readouterr().err


def test_a_folder_without_artifacts_is_said_to_hold_none(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["import", str(tmp_path / "empty"), "-o", str(tmp_path / "s.onnx")]) == 3
    assert "empty holds no training artifacts" in capsys.readouterr().err
    assert not (tmp_path / "s.onnx").exists()
