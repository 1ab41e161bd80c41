"""Models from standard input, texts on standard output; commands of texts run without ONNX Runtime."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES

MODEL = FIXTURES / "mlp_sgd.onnx"


@pytest.fixture
def piped(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data = io.BytesIO(MODEL.read_bytes())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data, isatty=lambda: False))


def test_a_model_comes_from_standard_input(piped, capsys):
    assert main(["inspect", "-", "--text"]) == 0
    text = capsys.readouterr().out
    assert main(["inspect", str(MODEL), "--text"]) == 0
    assert capsys.readouterr().out == text


def test_ranks_are_printed_as_text_and_nothing_is_written(piped, tmp_path, capsys):
    assert main(["shard", "-", "--ranks", "2", "-o", "-"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("; rank 0\n") and "; rank 1" in text and list(tmp_path.iterdir()) == []
    assert main(["shard", str(MODEL), "--ranks", "2", "-o", "out", "-q"]) == 0
    assert main(["inspect", "out", "--text"]) == 0
    assert capsys.readouterr().out == text
    assert main(["merge", "out", "-o", "-"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] and not (tmp_path / "-").exists()


def test_two_documents_do_not_share_standard_output(capsys):
    assert main(["shard", str(MODEL), "--ranks", "2", "-o", "-", "--json"]) == 2
    assert "--json cannot be combined with -o -" in capsys.readouterr().err


def test_a_terminal_holds_no_model(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(), isatty=lambda: True))
    assert main(["inspect", "-"]) == 2
    assert "which is a terminal" in capsys.readouterr().err


WITHOUT = """
import sys
sys.modules["onnxruntime"] = None
from pathlib import Path
from gopt.cli.main import main
model = sys.argv[1]
Path("gopt-golden.toml").write_text(f'[case.two]\\nmodel = "{model}"\\noptions = ["--ranks", "2"]\\n')
for words in (
    ["shard", model, "--ranks", "2", "-o", "out"], ["inspect", model], ["inspect", model, "--text"], ["inspect", "out"],
    ["diff", "out", "out"], ["diff", model, model], ["explain", "out", "loss"], ["plan", model, "--ranks", "2"],
    ["golden", "update", "."], ["golden", "check"], ["merge", "out", "-o", "one.onnx"], ["passes"], ["help", "roles"],
    ["reshard", "out", "--ranks", "3", "-o", "three"], ["report", "out", "--html", "page.html"],
):
    assert main([*words, "-q"]) == 0, words
for words in (["verify", "out"], ["run", "out", "--data", "data.npz", "--steps", "1", "--set", "lr=1"]):
    assert main(words) == 5, words
"""


def test_commands_of_texts_need_no_runtime(tmp_path):
    np.savez(tmp_path / "data.npz", x=np.zeros((64, 32), "f4"), y=np.zeros(64, "i8"))
    command = [sys.executable, "-c", WITHOUT, str(MODEL)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pip install 'gopt[run]'") == 2


def test_many_calls_in_one_process_need_no_deeper_stack(capsys):
    """Each call wrapped the callbacks of the one before, until the stack was full."""
    limit = sys.getrecursionlimit()
    assert main(["inspect", "gone.onnx"]) == 3
    sys.setrecursionlimit(250)
    try:
        assert [main(["inspect", "gone.onnx"]) for _ in range(150)] == [3] * 150
    finally:
        sys.setrecursionlimit(limit)
