"""An empty value is refused by name: it would be the current folder, or the default."""

from __future__ import annotations

from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES

MODEL = str(FIXTURES / "mlp_sgd.onnx")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["shard", MODEL, "--ranks", "2", "-o", ""], "--output"),
        (["shard", "", "--ranks", "2"], "MODEL"),
        (["shard", MODEL, "--ranks", "2", "--config", ""], "--config"),
        (["shard", MODEL, "--ranks", "2", "--reproducer", ""], "--reproducer"),
        (["inspect", ""], "PATH"),
        (["diff", "", MODEL], "A"),
        (["golden", "check", ""], "DIR"),
    ],
)
def test_an_empty_value_is_refused(arguments, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"gopt: error: {name} is empty\n  hint: is a variable of the shell not set?\n"
    assert not [*Path().iterdir()]
