"""Every kind is recognised by its content, whatever its name; what is damaged stays refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import kind_files
import pytest
from helpers import FIXTURES

from gopt.errors import GoptError, InputError
from gopt.offline.kinds import KINDS, inspect_path
from gopt.offline.kinds.candidate import FileCandidate
from gopt.offline.kinds.registry import kind_of

MADE = {
    "training_info": kind_files.training_info,
    "ort_training_model": kind_files.ort_training,
    "ort_optimizer_model": kind_files.ort_optimizer,
    "ort_checkpoint": kind_files.ort_checkpoint,
    "values": kind_files.safetensors,
}


@pytest.mark.parametrize("what", MADE)
def test_by_content(what: str, tmp_path: Path) -> None:
    """Under a name that says nothing, and under one that says something else."""
    for name in ("thing", "manifest.json", "rank_0000.onnx"):
        found = inspect_path(MADE[what](tmp_path / name))
        assert found is not None
        assert (found.to_json()["format"], found.to_json()["what"]) == ("gopt-inspection/1", what)


def test_files_of_gopt(ranks: Path, checkpoints: Path, tmp_path: Path) -> None:
    whats = {}
    for path in (ranks, ranks / "manifest.json", ranks / "report.json", ranks / "rank_0001.onnx", checkpoints):
        place = path
        if path.is_file():
            place = tmp_path / "thing"
            shutil.copy(path, place)
            shutil.copy(ranks / "states.bin", tmp_path)
        found = inspect_path(place)
        assert found is not None
        whats[path.name] = found.to_json()["what"]
    assert whats == {
        "mlp.ranks": "folder", "manifest.json": "manifest", "report.json": "report", "rank_0001.onnx": "rank_file",
        "checkpoints": "checkpoint",
    }  # fmt: skip


def test_a_step_and_an_inference_model_are_left_to_the_analysis(tmp_path: Path) -> None:
    for path in (FIXTURES / "mlp_sgd.onnx", kind_files.inference(tmp_path / "m.onnx")):
        assert kind_of(FileCandidate(path)) is None and inspect_path(path) is None


def test_names_are_different() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("what", MADE)
def test_a_cut_file_is_never_a_crash(what: str, tmp_path: Path) -> None:
    data = MADE[what](tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for length in range(0, len(data), max(1, len(data) // 40)):
        path.write_bytes(data[:length])
        try:
            inspect_path(path)
        except GoptError as error:
            assert error.exit_code in (3, 4, 5), error


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        inspect_path(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"not an output folder: it has no manifest\.json"):
        inspect_path(tmp_path)
