"""``gopt report`` writes its page whole or not at all, and over nothing but a page of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES

from gopt.offline.html_report import page_text, report_page
from gopt.system import staging


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", str(FIXTURES / "mlp_sgd.onnx"), "--ranks", "2", "-o", "out", "-q"]) == 0


def report(*more: str) -> int:
    return main(["report", "out", "--html", "page.html", *more])


def test_the_page_is_that_of_the_record(capsys):
    assert report() == 0
    assert Path("page.html").read_text(encoding="utf-8") == page_text(report_page(Path("out")))
    said = capsys.readouterr().out
    assert said.startswith("written to page.html (") and said.endswith(" KiB)\n")
    assert report("--force", "-q") == 0 and capsys.readouterr().out == ""
    assert sorted(os.listdir()) == ["out", "page.html"]


def test_equal_folders_have_equal_pages():
    assert report() == 0
    first = Path("page.html").read_bytes()
    assert report("--force") == 0 and Path("page.html").read_bytes() == first


def test_json_is_the_record(capsys):
    assert main(["report", "out", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads(json.dumps(report_page(Path("out")).to_json()))
    assert record["format"] == "gopt-report-page/1" and not Path("page.html").exists()
    assert report("--json") == 0 and Path("page.html").exists()


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> None:
    error = capsys.readouterr().err
    [line] = [each for each in error.splitlines() if each.startswith("gopt: error:")]
    assert code == 2 and all(word in line for word in words), error


def test_only_force_replaces_and_only_a_page(capsys):
    refused(capsys, main(["report", "out"]), "report needs a file to write")
    assert report() == 0
    capsys.readouterr()
    refused(capsys, report(), "page.html exists already")
    Path("page.html").write_text("<!doctype html>\nmine")
    refused(capsys, report("--force"), "is not a page of gopt report")
    assert Path("page.html").read_text() == "<!doctype html>\nmine"
    Path("page.html").unlink()
    Path("page.html").symlink_to("out/report.json")
    refused(capsys, report("--force"), "is not a file")
    Path("page.html").unlink()
    Path("page.html").mkdir()
    refused(capsys, report("--force"), "is not a file")


def test_no_page_lies_inside_an_output_folder(capsys):
    refused(capsys, main(["report", "out", "--html", "out/page.html"]), "is inside", "an output folder")


def test_a_full_disk_leaves_the_old_page(capsys, monkeypatch):
    assert report() == 0
    before = Path("page.html").read_bytes()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(staging, "sync", full)
    assert report("--force") == 5 and "the disk is full" in capsys.readouterr().err
    assert Path("page.html").read_bytes() == before and sorted(os.listdir()) == ["out", "page.html"]


def test_a_page_that_another_command_made_meanwhile_stays(capsys, monkeypatch):
    make = staging.Staged.commit

    def late(self: staging.Staged, *more: object) -> None:
        Path("page.html").write_text("theirs")
        make(self, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(staging.Staged, "commit", late)
    refused(capsys, report(), "was created by another command in the meantime")
    assert Path("page.html").read_text() == "theirs" and sorted(os.listdir()) == ["out", "page.html"]


def test_hostile_names_of_files_are_text(monkeypatch):
    name = "<img src=x onerror=alert(1)>"
    Path(f"{name}.onnx").write_bytes((FIXTURES / "mlp_sgd.onnx").read_bytes())
    assert main(["shard", f"{name}.onnx", "--ranks", "2", "-o", f"{name}.ranks", "-q"]) == 0
    assert main(["report", f"{name}.ranks", "--html", "page.html", "-q"]) == 0
    text = Path("page.html").read_text(encoding="utf-8")
    assert "<img" not in text and "&lt;img src=x onerror=alert(1)&gt;.onnx" in text
