"""Manifests, reports and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from gopt.errors import InputError
from gopt.offline.kinds import gopt_files
from gopt.offline.kinds.candidate import FileCandidate


def test_manifest_and_report(ranks: Path) -> None:
    manifest = gopt_files.inspect_manifest(FileCandidate(ranks / "manifest.json"))
    assert (manifest.ranks, manifest.files, manifest.present) == (2, 2, 2) and manifest.states["parameter"] == 4
    report = gopt_files.inspect_report(FileCandidate(ranks / "report.json"))
    assert report.source == "mlp_sgd.onnx" and "shard" in report.passes and report.added_ops


def test_a_damaged_manifest_is_refused(ranks: Path, tmp_path: Path) -> None:
    text = (ranks / "manifest.json").read_text()
    (tmp_path / "m").write_text(text.replace('"ranks"', '"tanks"', 1))
    candidate = FileCandidate(tmp_path / "m")
    assert gopt_files.is_manifest(candidate)
    with pytest.raises(InputError):
        gopt_files.inspect_manifest(candidate)


def test_checkpoints(checkpoints: Path) -> None:
    for place in (checkpoints, checkpoints / "step_00000004", checkpoints / "step_00000004" / "index.json"):
        candidate = FileCandidate(place)
        assert gopt_files.is_checkpoint(candidate)
        record = gopt_files.inspect_checkpoint(candidate)
        assert (record.steps, record.step, record.files, record.bytes, record.damaged) == ((4,), 4, 1, 24, ())
    (checkpoints / "step_00000004" / "rank_0000.safetensors").write_bytes(b"")
    assert gopt_files.inspect_checkpoint(FileCandidate(checkpoints)).damaged == ("rank_0000.safetensors",)
