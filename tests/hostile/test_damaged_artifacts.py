"""Folders of training artifacts with a file that is cut short, damaged, exchanged or of another model: a step, or a
refusal in one line that names the file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from gopt.cli.main import main
from products import part
from recordings import FOLDERS, NAMES

PARTS = ("training_model.onnx", "optimizer_model.onnx", "checkpoint")
CASES = [(name, file) for name in NAMES for file in PARTS]


def copied(name: str, place: Path) -> Path:
    shutil.rmtree(place / "step", ignore_errors=True)
    return Path(shutil.copytree(FOLDERS / name, place / "step"))


def hold(folder: Path, file: str, label: str, capsys: pytest.CaptureFixture[str], *, refused: bool = True) -> bool:
    """Import a folder; returns whether it was refused, for a reason that names ``file``."""
    code = main(["import", str(folder), "-o", str(folder.parent / "out.onnx"), "--force"])
    said = capsys.readouterr().err
    if code == 0 and not refused:
        return False
    assert code in (3, 4), f"{label}: {code}: {said}"
    assert said.startswith("gopt: error: ") and said.count("gopt: error: ") == 1 and file in said, f"{label}: {said}"
    assert all(line.startswith("  hint: ") for line in said.splitlines()[1:]), f"{label}: {said}"
    assert not (folder.parent / "out.onnx").exists(), label
    return True


@pytest.mark.parametrize(("name", "file"), part(CASES, 9))
def test_a_file_that_is_cut_short(name, file, tmp_path, capsys):
    """At both ends, and at places between that are drawn from the name."""
    data = (FOLDERS / name / file).read_bytes()
    folder = copied(name, tmp_path)
    places = {0, 1, 3, 4, 7, 8, 9, len(data) - 1, len(data) - 2, len(data) // 2, len(data) // 10 * 9}
    places |= {random.Random(f"{name} {file} {k}").randrange(len(data)) for k in range(6)}
    for place in sorted(places):
        (folder / file).write_bytes(data[:place])
        padding = file == "checkpoint" and not any(data[place:])  # behind the last value
        hold(folder, file, f"{name}/{file} cut at {place} of {len(data)}", capsys, refused=not padding)
        (tmp_path / "out.onnx").unlink(missing_ok=True)


@pytest.mark.parametrize(("name", "file"), part(CASES, 9))
def test_damaged_bytes(name, file, tmp_path, capsys):
    """Bits that turn, bytes that are zero, bytes that are missing: a damaged value is read as it is."""
    data, seen = (FOLDERS / name / file).read_bytes(), 0
    folder = copied(name, tmp_path)
    for turn in range(12):
        draw, bad = random.Random(f"{name} {file} {turn}"), bytearray(data)
        place = draw.randrange(min(len(bad), 3000))
        if turn % 3 == 0:
            bad[place] ^= 1 << draw.randrange(8)
        elif turn % 3 == 1:
            bad[place : place + 40] = bytes(len(bad[place : place + 40]))
        else:
            del bad[place : place + draw.randrange(1, 40)]
        (folder / file).write_bytes(bad)
        seen += hold(folder, file, f"{name}/{file}, turn {turn} at {place}", capsys, refused=False)
        (tmp_path / "out.onnx").unlink(missing_ok=True)
    assert seen > 3


@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (1, 2)])
def test_files_under_one_anothers_names(pair, tmp_path, capsys):
    """They are known by what they hold."""
    folder = copied("mlp_clip", tmp_path)
    first, second = (folder / PARTS[place] for place in pair)
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    assert not hold(folder, "", str(pair), capsys, refused=False)


OTHERS = [(name, other) for name in NAMES for other in NAMES if other != name]


@pytest.mark.parametrize(("name", "other"), part(OTHERS, 12))
def test_a_checkpoint_of_another_model(name, other, tmp_path, capsys):
    folder = copied(name, tmp_path)
    shutil.copy(FOLDERS / other / "checkpoint", folder)
    alike = {"mlp_adamw", "mlp_sgd", "mlp_clip"}  # one model: a checkpoint before the first step is of both
    if not hold(folder, "checkpoint", f"{name} with {other}'s", capsys, refused=False):
        assert {name, other} <= alike


@pytest.mark.parametrize("file", PARTS[:2])
def test_a_graph_in_the_place_of_another(file, tmp_path, capsys):
    folder = copied("mlp_adamw", tmp_path)
    shutil.copy(folder / "eval_model.onnx", folder / file)
    hold(folder, file, file, capsys)
    for each in PARTS[:2]:
        (folder / each).write_bytes(b"\x08\x07damaged")
    hold(folder, "training_model.onnx", "both graphs", capsys)
