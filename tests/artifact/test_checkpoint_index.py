"""An index shows that a checkpoint is whole: what it is of, which step, and every file by size and digest."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from gopt.artifact.checkpoint_index import (
    INDEX_FILE,
    CheckpointIndex,
    check_states_file,
    complete_steps,
    open_index,
    rank_states_file,
    read_index,
    step_dir,
)
from gopt.artifact.integrity import FileEntry
from gopt.artifact.manifest import Manifest
from gopt.artifact.manifest_entries import CommonEntry, MeshEntry
from gopt.errors import RunError

MANIFEST = Manifest(
    mesh=MeshEntry((("shard", 1),), 1), source="source.onnx", loss="loss", states=(), common=CommonEntry((), (), ()),
    ranks=(),
)  # fmt: skip
DATA = b"values" * 1000


@pytest.fixture
def step(tmp_path) -> Path:
    """A whole checkpoint of step 12."""
    folder = tmp_path / step_dir(12)
    folder.mkdir()
    (folder / rank_states_file(0)).write_bytes(DATA)
    entry = FileEntry(len(DATA), hashlib.sha256(DATA).hexdigest())
    index = CheckpointIndex(step=12, manifest=MANIFEST.digest(), files={rank_states_file(0): entry})
    (folder / INDEX_FILE).write_text(index.text())
    return folder


def test_only_whole_steps_count_and_the_newest_is_last(step):
    for number, whole in ((9, True), (100_000_000, True), (50, False)):
        (step.parent / step_dir(number)).mkdir()
        if whole:
            (step.parent / step_dir(number) / INDEX_FILE).touch()
    (step.parent / "step_7").mkdir()
    (step.parent / "step_7" / INDEX_FILE).touch()
    assert complete_steps(step.parent) == [9, 12, 100_000_000]
    assert complete_steps(step.parent / "nowhere") == complete_steps(step / INDEX_FILE) == []


def test_what_is_whole_is_read(step):
    [(name, entry)] = read_index(step, MANIFEST, None).files.items()
    check_states_file(step / name, entry)


def test_it_knows_the_ranks_that_it_is_of(step):
    with pytest.raises(RunError, match="was written by ranks of another folder") as caught:
        read_index(step, replace(MANIFEST, loss="other"), None)
    assert "gopt reshard" in caught.value.hints[0]


def test_it_knows_the_run_that_it_is_of(step):
    index = replace(open_index(step), run="1" * 32)
    (step / INDEX_FILE).write_text(index.text())
    assert read_index(step, MANIFEST, "1" * 32) == replace(index, seal=open_index(step).seal)
    for other in ("2" * 32, None):
        with pytest.raises(RunError, match="is of another run") as caught:
            read_index(step, MANIFEST, other)
        assert caught.value.hints[0].endswith(f"gopt seal {step}")


@pytest.mark.parametrize("name", ["step_00000013", "step_000000120"])
def test_a_folder_under_another_steps_name(step, name):
    moved = step.rename(step.parent / name)
    with pytest.raises(RunError, match="step: 12 differs from the step of its folder"):
        open_index(moved)


def test_a_copy_under_a_name_of_the_users_own(step):
    assert open_index(step.rename(step.parent / "best")).step == 12


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "lacks rank_0000.safetensors"),
        (lambda path: path.write_bytes(DATA[:-1]), "edited or damaged"),
        (lambda path: path.write_bytes(DATA + b"x"), "edited or damaged"),
        (lambda path: path.write_bytes(DATA[:-1] + b"x"), "edited or damaged"),
    ],
    ids=["lost", "cut", "longer", "changed"],
)
def test_a_file_that_is_not_as_the_index_says(damage, said, step):
    name = rank_states_file(0)
    damage(step / name)
    with pytest.raises(RunError, match=said):
        check_states_file(step / name, read_index(step, MANIFEST, None).files[name])


def test_a_file_that_the_index_does_not_name(step):
    (step / "other").touch()
    with pytest.raises(RunError, match="lacks other"):
        check_states_file(step / "other", read_index(step, MANIFEST, None).files.get("other"))
