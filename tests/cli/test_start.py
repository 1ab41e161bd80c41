"""An interrupt while Python imports: the command ends with 130, and prints no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

MODEL = str(ROOT / "fixtures/mlp_adamw.onnx")
INTERRUPTER = """
import signal, sys
class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            {first}
            signal.raise_signal(signal.SIGINT)
interrupter = Interrupter()
sys.meta_path.insert(0, interrupter)
"""
"""Read by Python at its start. SIGINT comes when a module is first looked for, and never by the clock."""


def started(folder: Path, name: str, *arguments: str, first: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(INTERRUPTER.format(name=name, first=first), encoding="utf-8")
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return subprocess.run(
        [sys.executable, "-c", "from gopt.cli.start import entry\nentry()", *arguments],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gopt.cli.main", "click", "gopt.cli.terminal", "gopt.cli.reproducer_option"])
def test_before_the_command_line_is_there(tmp_path: Path, name: str):
    done = started(tmp_path, name, "inspect", MODEL)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("name", ["gopt.cli.inspect", "onnx", "numpy", "gopt.offline.inspect"])
def test_while_a_command_imports_its_libraries(tmp_path: Path, name: str):
    done = started(tmp_path, name, "inspect", MODEL)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.lstrip("\n") == "gopt: error: interrupted\n"  # click ends the line of a terminal's ^C


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path):
    ignored = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    done = started(tmp_path, "gopt.cli.start", "--version", first=ignored)
    assert done.returncode == 0 and done.stdout.startswith("gopt ")


def test_after_the_command_has_ended(tmp_path: Path):
    """While the interpreter ends."""
    late = "import atexit; atexit.register(lambda: signal.raise_signal(signal.SIGINT)); return None"
    done = started(tmp_path, "gopt.cli.main", "--version", first=late)
    assert (done.returncode, done.stderr) == (130, "") and done.stdout.startswith("gopt ")


def test_without_the_memory_to_say_why(tmp_path: Path):
    """Python's own code for an error that nobody takes is 1: it would say that a check found a difference."""
    (tmp_path / "sitecustomize.py").write_text(
        "import gopt.cli.main as command\ndef short(*_):\n    raise MemoryError\ncommand.main = short\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from gopt.cli.start import entry\nentry()", "inspect", MODEL],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (5, "gopt: error: out of memory\n")


def test_the_installed_command_starts_here():
    text = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert "gopt = gopt.cli.start:entry" in text
    assert "from .start import entry" in (ROOT / "cli/__main__.py").read_text(encoding="utf-8")
