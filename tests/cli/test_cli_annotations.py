"""Annotations of GitHub, codes of errors, and the action and the hooks that use them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gopt.cli import annotations
from gopt.cli.help import TOPICS
from gopt.cli.main import main
from helpers import FIXTURES, ROOT

from gopt import errors

MODEL = FIXTURES / "mlp_sgd.onnx"
CASE = '[case.two]\nmodel = "mlp_sgd.onnx"\noptions = ["--ranks", "{}"]\n'


@pytest.fixture
def goldens(tmp_path, monkeypatch) -> Path:
    """A folder of goldens that differ from what gopt makes now."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "some/goldens"
    folder.mkdir(parents=True)
    shutil.copy(MODEL, folder)
    (folder / "gopt-golden.toml").write_text(CASE.format(2))
    assert main(["golden", "update", str(folder)]) == 0
    (folder / "gopt-golden.toml").write_text(CASE.format(3))
    return folder


def test_a_golden_that_differs_is_annotated_where_it_does(goldens, capsys):
    capsys.readouterr()
    assert main(["golden", "check", "--format", "github"]) == 1
    *text, note = capsys.readouterr().out.splitlines()
    found = re.match(r"::error file=some/goldens/golden/two.txt,line=(\d+),title=gopt G100::@@", note)
    assert found and "%0A-" in note and "to accept: gopt golden update some/goldens" in text
    assert main(["golden", "check"]) == 1
    assert capsys.readouterr().out.splitlines() == text


def test_differences_and_errors_are_annotated(capsys):
    other = str(FIXTURES / "mlp_adamw.onnx")
    assert main(["diff", str(MODEL), other, "--format=github"]) == 1
    assert f"::error file={other},title=gopt G100::" in capsys.readouterr().out
    for words, code in ((["none.onnx"], "G300"), ([], "G200"), (["x", "--no"], "G200")):
        assert main(["diff", str(MODEL), *words, "--format", "github"]) != 0
        assert f"::error title=gopt {code}::" in capsys.readouterr().out
    assert main(["diff", str(MODEL), other]) == 1
    assert "::error" not in capsys.readouterr().out


def test_without_a_folder_there_must_be_one(goldens, monkeypatch, tmp_path, capsys):
    shutil.copytree(goldens, tmp_path / "more")
    assert main(["golden", "check"]) == 2
    assert "several folders have a gopt-golden.toml: more, some/goldens" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["golden", "check"]) == 3


def test_every_code_is_on_the_page() -> None:
    page = (TOPICS / "errors.txt").read_text(encoding="utf-8")
    classes = [each for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "code")]
    own = {getattr(annotations, name) for name in ("DIFFERENCE", "USAGE", "SYSTEM", "MEMORY", "STOPPED", "DEFECT")}
    assert {each.code for each in classes} | own == set(re.findall(r"^(G\d+) ", page, re.M))
    for each in classes:
        assert each.__name__ == "GoptError" or re.search(rf"^{each.code} .*{each.__name__}", page, re.M), each


def test_the_action_and_the_hooks_run_as_they_are_written(goldens, tmp_path):
    """The step of the action behind the installation, in a shell; the hooks without args."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {each["entry"] for each in hooks} == {"gopt golden check"} and not any(each.get("args") for each in hooks)
    check = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"][-1]["run"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gopt").write_text(f'#!/bin/sh\nexec {sys.executable} -m gopt.cli "$@"\n')
    (tmp_path / "bin/gopt").chmod(0o755)
    summary = tmp_path / "summary.md"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    for folder in ("", "some/goldens"):
        own = {**os.environ, "PATH": path, "FOLDER": folder, "GITHUB_STEP_SUMMARY": str(summary)}
        done = subprocess.run(["bash", "-e", "-c", check], cwd=tmp_path, env=own, capture_output=True, text=True)
        assert done.returncode == 1 and "::error file=some/goldens/golden/two.txt" in done.stdout, done.stderr
    assert "+++ golden/two.txt (now)" in summary.read_text() and "::error" not in summary.read_text()
