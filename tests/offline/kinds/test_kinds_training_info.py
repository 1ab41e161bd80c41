"""Models with ``training_info``."""

from __future__ import annotations

from pathlib import Path

from kind_files import inference, training_info

from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.training_info import has_training_info, inspect_training_info


def test_entries(tmp_path: Path) -> None:
    candidate = FileCandidate(training_info(tmp_path / "m.onnx"))
    assert has_training_info(candidate)
    record = inspect_training_info(candidate)
    step = record.steps[0]
    assert step.updates == {"w": "w_new"} and step.initialized == ("w",) and step.differentiates == ("w",)
    assert step.operators == {"ai.onnx.preview.training.Gradient": 1, "Sub": 1}
    assert any("gopt writes that backward" in note for note in record.notes)
    assert "'w_first', which is not an output of its graph" in record.refusal and "correct" in record.next


def test_a_plain_model_has_none(tmp_path: Path) -> None:
    assert not has_training_info(FileCandidate(inference(tmp_path / "m.onnx")))
