"""Folders of ONNX Runtime's training artifacts."""

from __future__ import annotations

from pathlib import Path

from kind_files import ort_artifacts, ort_checkpoint

from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.ort_artifacts import inspect_ort_artifacts, is_ort_artifacts


def test_parts_and_others(tmp_path: Path) -> None:
    folder = FileCandidate(ort_artifacts(tmp_path / "artifacts"))
    assert is_ort_artifacts(folder)
    record = inspect_ort_artifacts(folder)
    assert record.training is not None and record.optimizer is not None and record.checkpoint is not None
    assert record.others == ("eval_model.onnx",) and record.notes == ()
    assert record.to_json()["checkpoint"]["what"] == "ort_checkpoint"


def test_what_does_not_fit(tmp_path: Path) -> None:
    folder = ort_artifacts(tmp_path / "artifacts")
    ort_checkpoint(folder / "checkpoint", (2, 4))
    (folder / "optimizer_model.onnx").unlink()
    notes = inspect_ort_artifacts(FileCandidate(folder)).notes
    assert notes == ("no optimizer graph here", "1 parameters have another shape in the checkpoint, w first")


def test_another_folder(tmp_path: Path) -> None:
    assert not is_ort_artifacts(FileCandidate(tmp_path))
