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


OTHER_THREAD = """
import os, signal, sys, threading, time
from pathlib import Path
from gopt.cli import trial
from gopt.system.signals import raise_on_signals
from gopt.errors import StoppedError

def send():
    while not Path("begun").exists():
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

signal.signal(signal.SIGTERM, signal.SIG_DFL)
threading.Thread(target=send, daemon=True).start()
code = "import time; open('begun', 'w').close(); time.sleep(600)"
try:
    with raise_on_signals():
        trial.run_program([sys.executable, "-c", code], Path.cwd(), 600)
except StoppedError as error:
    print(error)
"""
DROPPED = """
import signal, sys
from gopt.cli import trial
from gopt.cli.main import main
from gopt.offline.reproducer.failure import Failure

class Drops:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def run_program(*words):
    calls.append(words)
    Drops()
    return Failure(9, "program", "")

calls = []
trial.run_program = run_program
signal.signal(signal.SIGTERM, signal.SIG_DFL)
code = main(["reduce", sys.argv[1], "-o", "small.onnx", "--", "false", "{}"])
print(code, len(calls))
"""
OPEN = "import os, sys, time; os.fork() and sys.exit(3); os.setsid(); time.sleep(20)"
"""A program that ends and leaves a process, in a session of its own, with its streams."""


def said_by(script: str, tmp_path, *words: str) -> str:
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300).stdout.strip()


def test_a_signal_that_another_thread_gets_ends_the_wait(tmp_path):
    """The wait was for the program alone, and a signal that did not interrupt it was seen when the program ended."""
    assert said_by(OTHER_THREAD, tmp_path) == "stopped by SIGTERM"


def test_a_signal_that_python_drops_ends_the_search(tmp_path):
    """Raised in a destructor it is lost: the search ran on, for as long as its tries lasted."""
    assert said_by(DROPPED, tmp_path, MODEL) == "143 1"
    assert not (tmp_path / "small.onnx").exists()


def test_a_process_that_left_the_session_holds_nothing_up(tmp_path):
    """It keeps the pipe of the program open: the wait ends with the time, not with the pipe."""
    assert run_program([sys.executable, "-c", OPEN], tmp_path, 1) == Failure(-1, "time-out")
