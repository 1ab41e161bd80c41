"""A manifest whose boxes were edited: refused by the key that is wrong, without work that grows with the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gopt.cli.main import main
from helpers import edit_manifest, source

import gopt
from gopt.records.mesh import Mesh

Box = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("boxes") / "out"
    gopt.shard(source("mlp_adamw"), Mesh.parse("tp=3"), stage=0).write(out)
    return out


def backwards(box: Box) -> None:
    box[0].reverse()


def odd(box: Box) -> None:
    box[0].append(box[0][-1])


def beyond(box: Box) -> None:
    box[0][-1] = 1 << 62


def flat(box: Box) -> None:
    box.pop()


def deeper(box: Box) -> None:
    box.append([0, 1])


def empty(box: Box) -> None:
    box[0].clear()


def negative(box: Box) -> None:
    box[0][0] = -1


def overlapping(box: Box) -> None:
    start, stop = box[0]
    box[0][:] = [start, stop, start, stop]


def shorter(box: Box) -> None:
    box[0][1] -= 1


def shifted(box: Box) -> None:
    box[0][:] = [end - 1 if box[0][0] else end + 1 for end in box[0]]


def many(box: Box) -> None:
    box[0][:] = [0] * 100_000


def many_backwards(box: Box) -> None:
    box[0][:] = [1, 0] * 50_000


EDITS: list[tuple[Callable[[Box], None], str]] = [
    (backwards, "not ranges of a dimension"),
    (odd, "not ranges of a dimension"),
    (beyond, "not ranges of a dimension"),
    (flat, "dimensions, 'fc1.weight' has"),
    (deeper, "dimensions, 'fc1.weight' has"),
    (empty, "box"),
    (negative, "box"),
    (overlapping, "not ranges of a dimension"),
    (shorter, "is not a range of its elements"),
    (many_backwards, "its 100000 ends are not ranges of a dimension"),
    (many, "is not a range of its elements"),
    (shifted, "do not tile it"),
]


@pytest.mark.parametrize(("edit", "text"), EDITS, ids=[edit.__name__ for edit, _ in EDITS])
def test_a_box_that_is_none(edit, text, folder, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())

    def piece(manifest: dict[str, Any]) -> None:
        state = next(each for each in manifest["ranks"][1]["state"] if each["input"] == "fc1.weight")
        edit(state["pieces"][0]["box"])

    edit_manifest(out, piece)
    assert main(["merge", str(out), "-o", str(tmp_path / "back.onnx")]) == 3
    told = capsys.readouterr().err
    assert text in told and told.count("\n") <= 3 and len(told) < 1000
    assert not (tmp_path / "back.onnx").exists()
