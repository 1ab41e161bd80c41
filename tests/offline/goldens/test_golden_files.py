"""The folder of goldens: replaced as a whole, and nothing but what gopt wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

import gopt.system.staging as staging
from gopt.errors import InputError, OptionError, RunError
from gopt.offline.goldens.golden_files import check_goldens, read_cases, update_goldens
from gopt.offline.goldens.golden_text import FIRST_LINE, SECTIONS

TEXT = f"{FIRST_LINE} (gopt 0.1)\n\nasked\n  shard\n"


def cases(folder: Path, text: str) -> list[tuple[str, ...]]:
    (folder / "gopt-golden.toml").write_text(text)
    return [(case.name, *case.keep) for case in read_cases(folder)]


def test_cases_and_what_they_keep(tmp_path: Path) -> None:
    case = '[case.{}]\nmodel = "m.onnx"\noptions = []\n'
    assert cases(tmp_path, case.format("b") + case.format("a")) == [("a", *SECTIONS), ("b", *SECTIONS)]
    keep = 'keep = ["calls"]\n' + case.format("a") + case.format("b") + 'keep = ["passes", "ranks"]\n'
    assert cases(tmp_path, keep) == [("a", "calls"), ("b", "ranks", "passes")]


@pytest.mark.parametrize("name", ["../x", ".x", "a/b", ""])
def test_a_case_that_names_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="names no file"):
        cases(tmp_path, f'[case."{name}"]\nmodel = "m.onnx"\noptions = []\n')


def test_an_update_says_what_changed(tmp_path: Path) -> None:
    assert update_goldens(tmp_path, {"a": TEXT, "b": TEXT}) == ["added golden/a.txt", "added golden/b.txt"]
    assert update_goldens(tmp_path, {"a": TEXT, "b": TEXT}) == []
    assert update_goldens(tmp_path, {"a": f"{TEXT}  x\n", "c": TEXT}) == [
        "changed golden/a.txt", "removed golden/b.txt", "added golden/c.txt"
    ]  # fmt: skip
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "c.txt", "golden"]
    found = check_goldens(tmp_path, {"a": TEXT, "b": TEXT})
    assert (found.missing, found.extra, list(found.differing)) == (("b.txt",), ("c.txt",), ["a.txt"])
    assert "-  x" in found.differing["a.txt"] and found.exit_code == 1


def test_what_gopt_did_not_write_is_left(tmp_path: Path) -> None:
    update_goldens(tmp_path, {"a": TEXT})
    for name, content in (("own.txt", "mine\n"), ("a.md", TEXT)):
        (tmp_path / "golden" / name).write_text(content)
        for act in (update_goldens, check_goldens):
            with pytest.raises(OptionError, match=f"{name} was not written by gopt golden"):
                act(tmp_path, {"b": TEXT})
        (tmp_path / "golden" / name).unlink()
    assert [path.name for path in (tmp_path / "golden").iterdir()] == ["a.txt"]


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update_goldens(tmp_path, {"a": TEXT})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(staging, "sync_folder", full)
    with pytest.raises(RunError, match="the disk is full"):
        update_goldens(tmp_path, {"b": TEXT})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "golden"]
