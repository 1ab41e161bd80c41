"""``gopt init``: what it says, and of a file that is there."""

from __future__ import annotations

import pytest
from gopt.cli.main import main


def test_says_the_next_command_on_a_line_of_its_own(tmp_path, monkeypatch, capsys):
    """Its line break was written as a backslash."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine.py"]) == 0
    assert "next:  gopt export mine.py:make -o step.onnx" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("arguments, says", [
    (["init", "there"], "choose another name with gopt init NAME.py, or replace it with --force"),
    (["merge", "x.ranks", "--state-dict", "there"], "choose another name with --state-dict, or replace it with"),
])  # fmt: skip
def test_a_hint_on_a_file_that_is_there_names_what_the_command_has(arguments, says, tmp_path, monkeypatch, capsys):
    """The hint of every command named ``-o``."""
    monkeypatch.chdir(tmp_path)
    name = "there.py" if arguments[0] == "init" else "there.safetensors"
    (tmp_path / name).touch()
    assert main([name if each == "there" else each for each in arguments]) == 2
    assert says in capsys.readouterr().err
