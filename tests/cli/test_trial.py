"""Commands in a process of their own: crashes, hangs and exits end that process alone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from gopt.cli import main as entry
from gopt.cli.trial import run_commands, run_program
from helpers import FIXTURES

from gopt.offline.reproducer.failure import Failure

MODEL = str(FIXTURES / "mlp_sgd.onnx")


def test_the_first_command_that_fails_is_told(tmp_path):
    assert run_commands([["inspect", MODEL]], tmp_path, 60) is None
    found = run_commands([["inspect", MODEL], ["inspect", "missing.onnx"]], tmp_path, 60)
    assert found is not None and (found.exit_code, found.kind, found.command) == (3, "InputError", 1)
    assert "missing.onnx" in (tmp_path / "stderr.txt").read_text()


def test_a_crash_and_a_hang_are_failures(tmp_path, monkeypatch):
    monkeypatch.setattr(entry, "run", lambda words: os.kill(os.getpid(), signal.SIGKILL))
    assert run_commands([["x"]], tmp_path, 60) == Failure(-9, "signal", "SIGKILL")
    monkeypatch.setattr(entry, "run", lambda words: time.sleep(600))
    assert run_commands([["x"]], tmp_path, 0.2) == Failure(-1, "time-out")


def test_a_program_fails_by_its_code_and_first_line(tmp_path):
    code = "import sys; print('no\\nmore', file=sys.stderr); sys.exit(7)"
    assert run_program([sys.executable, "-c", code], tmp_path, 60) == Failure(7, "program", "no")
    assert run_program([sys.executable, "-c", ""], tmp_path, 60) is None
    assert run_program([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, 0.2) == Failure(-1, "time-out")


ORPHAN = """
import os, sys, time
from pathlib import Path
from gopt.cli import main, trial

def hang(arguments):
    Path("number.new").write_text(str(os.getpid()))
    os.rename("number.new", "number")
    time.sleep(600)

main.run = hang
if sys.argv[1] == "gopt":
    trial.run_commands([["shard"]], Path.cwd(), 600)
else:
    code = "import os, time; open('n', 'w').write(str(os.getpid())); os.rename('n', 'number'); time.sleep(600)"
    trial.run_program([sys.executable, "-c", code], Path.cwd(), 600)
"""


@pytest.mark.parametrize("kind", ["gopt", "program"])
def test_a_command_ends_with_the_process_that_runs_it(kind, tmp_path):
    """Killed by the system, ``gopt reduce`` left a command behind that went on for as long as it liked."""
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, kind], cwd=tmp_path)
    while not (tmp_path / "number").exists():
        assert parent.poll() is None
        time.sleep(0.01)
    child = os.pidfd_open(int((tmp_path / "number").read_text()))
    parent.kill()
    parent.wait()
    try:
        assert select.select([child], [], [], 60)[0], "it goes on"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
