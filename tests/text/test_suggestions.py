"""Suggestions for names that are not known."""

from __future__ import annotations

import os

import pytest

from gopt.text.suggestions import MOST, did_you_mean, files_with_suffix, near_file


def test_the_nearest_name_is_quoted_and_escaped():
    assert did_you_mean("los", ["lr", "loss", "labels"]) == "did you mean 'loss'?"
    assert did_you_mean("weight\x1b", ["weight\x1b[1m"]) == r"did you mean 'weight\x1b[1m'?"


def test_a_name_far_from_all_has_none():
    assert did_you_mean("zzz", ["loss", "lr"]) is None
    assert did_you_mean("loss", []) is None


def test_only_so_many_names_are_compared():
    names = (f"other{i}" for i in range(10 * MOST))
    did_you_mean("nothing", names)
    assert next(names) == f"other{MOST}"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("d/stpe.onnx", "did you mean 'd/step.onnx'?"),
        ("d/q.onnx", "there are 'd/a.onnx', 'd/b.onnx', 'd/step.onnx'"),
        ("d/xstep9.onnx", "did you mean 'd/step.onnx'?"),
        ("d/tree.onnx", "there are 'd/step.onnx', 'd/a.onnx', 'd/b.onnx'"),
        ("d/q.npz", "folder 'd' has no '.npz' file"),
        ("q.npz", "the current folder has no '.npz' file"),
        ("d/q", "there are 'd/a.onnx', 'd/b.onnx', 'd/step.onnx'"),
        ("empty/q", "folder 'empty' is empty"),
        ("d/missing/deep/x.onnx", "there is no folder 'd/missing'"),
        ("d/a.onnx/x", "there is no folder 'd/a.onnx'"),
        ("dd", "did you mean 'd'?"),
        ("d/\0.onnx", "there are 'd/a.onnx', 'd/b.onnx', 'd/step.onnx'"),
    ],
)
def test_a_missing_file_has_a_hint(path, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("d")
    os.mkdir("empty")
    for name in ("step.onnx", "b.onnx", "a.onnx"):
        open(f"d/{name}", "w").close()
    assert near_file(path) == (() if hint is None else (hint,))
    assert near_file("d/stpe", folders=True) == near_file("d/q.onnx", folders=True) == ()
    assert near_file("dd", folders=True) == ("did you mean 'd'?",)
    assert files_with_suffix("d", ".onnx") == ["d/a.onnx", "d/b.onnx", "d/step.onnx"]
    assert files_with_suffix("missing", ".onnx") == []
