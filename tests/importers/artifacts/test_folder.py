"""The parts of a folder of artifacts, known by what they hold."""

from __future__ import annotations

import shutil

import pytest
from recordings import FOLDERS, copied

from gopt.errors import InputError
from gopt.importers.artifacts.folder import read_artifacts


def test_names_do_not_matter(tmp_path):
    folder = copied("mlp_adamw", tmp_path)
    for place, file in enumerate(sorted(folder.iterdir())):
        file.rename(folder / f"{9 - place}.bin")
    parts = read_artifacts(folder)
    assert parts is not None
    assert len(parts.training.model.graph.node) == 26
    assert [each.op_type for each in parts.optimizer.model.graph.node] == ["AdamWOptimizer"]
    assert len(parts.checkpoint.trainable) == 6


def test_a_folder_of_other_things_has_none(tmp_path):
    (tmp_path / "note.txt").write_text("nothing")
    shutil.copy(FOLDERS / "mlp_adamw" / "checkpoint", tmp_path)
    shutil.copy(FOLDERS / "mlp_adamw" / "eval_model.onnx", tmp_path)
    assert read_artifacts(tmp_path) is None


@pytest.mark.parametrize(
    ("file", "what"),
    [("training_model.onnx", "training graph"), ("optimizer_model.onnx", "optimizer graph"), ("checkpoint",) * 2],
)
def test_each_part_is_there_once(file, what, tmp_path):
    folder = copied("mlp_adamw", tmp_path)
    shutil.copy(folder / file, folder / "again")
    with pytest.raises(InputError, match=rf"2 files are a {what}: again, {file}"):
        read_artifacts(folder)
    (folder / file).unlink()
    (folder / "again").unlink()
    with pytest.raises(InputError, match=f"no {what} here"):
        read_artifacts(folder)


def test_the_digest_is_of_every_byte(tmp_path):
    first = read_artifacts(FOLDERS / "mlp_adamw")
    folder = copied("mlp_adamw", tmp_path)
    assert read_artifacts(folder).digest() == first.digest()
    for file in ("training_model.onnx", "optimizer_model.onnx", "checkpoint"):
        held = (folder / file).read_bytes()
        (folder / file).write_bytes(held + b"\0\0" if file == "checkpoint" else held + b"\x22\x01x")
        assert read_artifacts(folder).digest() != first.digest()
        (folder / file).write_bytes(held)
    assert first.nbytes == sum(path.stat().st_size for path in first.files)
