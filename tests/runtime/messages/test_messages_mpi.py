"""Endpoints as MPI processes: the scenes of ``mpi_scenes.py``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from helpers import mpiexec

from gopt.errors import OptionError
from gopt.runtime.engines.processes import RankProcesses
from gopt.runtime.messages.mpi import MpiHub
from gopt.runtime.messages.roster import Roster

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")
SCENES = Path(__file__).parent / "mpi_scenes.py"


def survivors(
    processes: int, command: list[str], environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As ``gopt run --launch`` starts them: the exit code is that of the first that died."""
    with tempfile.TemporaryFile() as out:
        job = RankProcesses.start(processes, command, environment, out.fileno(), out.fileno())
        code = 0
        while job.running:
            for rank in job.serve(0.1):
                code = code or job.codes[rank]
        job.end()
        out.seek(0)
        said = out.read().decode()
    return subprocess.CompletedProcess(command, code if code >= 0 else 128 - code, said, "")


def play(scene: str, processes: int, folder: Path, shield: bool = False) -> tuple[dict[int, object], int, str]:
    """What each endpoint saw, the job's exit code and what it printed."""
    command = [sys.executable, str(SCENES), scene, str(folder)]
    environment = {**os.environ, "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    if shield:
        done = survivors(processes, command, environment)
    else:
        whole = [mpiexec(), "-n", str(processes), *command]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=300, env=environment)
    found = {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}
    return found, done.returncode, done.stdout + done.stderr


def test_messages_come_whole_and_in_order(tmp_path):
    """From any source, to roles that share a process too, of every type, in chunks, into memory that waits for them."""
    found, code, said = play("everything", 3, tmp_path)
    assert found == {0: [2, 3], 1: [2, 3], 2: [150, 150], 3: [150, 150]} and code == 0, (found, said)


def test_a_full_queue_blocks(tmp_path):
    found, code, said = play("blocked", 2, tmp_path)
    late = (
        "after 0.3 s, trainer 0 (endpoint 0, process 0) still waits for server 0 (endpoint 1, process 1) "
        "to take PUSH of key 2 in round 0"
    )
    assert found == {0: [late, [True, True, False, False], True], 1: True} and code == 0, (found, said)


def test_the_others_go_on_when_a_process_is_killed(tmp_path):
    found, code, said = play("dies", 3, tmp_path, shield=True)
    lost = r"trainer 1 .* is lost: (it has given no sign of life for 1 s|MPI has given up a transfer: .*); server 0 "
    assert found[0] == 20 and re.match(lost, str(found[2])) and set(found) == {0, 2}, (found, said)
    assert code == 137 and "trainer 0 prints" in said and said.count("server 0 prints") == 20, (code, said)


@pytest.mark.slow
def test_the_others_go_on_when_two_are_killed_in_one_moment(tmp_path):
    found, code, said = play("two_die", 4, tmp_path, shield=True)
    assert found == {0: 20, 3: [1, 2]} and code == 137, (found, code, said)


def test_a_failure_ends_the_others(tmp_path):
    """Shielded, as MPI's launcher else ends the process that is still writing when the other has left."""
    found, code, said = play("fails", 2, tmp_path, shield=True)
    why = "stopped, because trainer 1 (endpoint 1, process 1) failed: ValueError: no data; "
    assert found == {
        0: f"{why}trainer 0 (endpoint 0, process 0) waited for server 0 (endpoint 2, process 1) "
        "to send VALUES of key 3 in round 5",
        1: "failed",
        2: f"{why}server 0 (endpoint 2, process 1) waited for trainer 1 (endpoint 1, process 1) "
        "to take PUSH of key 0 in round 0",
    }, (found, said)
    assert code == 0


def test_processes_are_as_many_as_roles_need():
    with pytest.raises(OptionError, match="the launcher started 1 processes, the roles need 2"):
        MpiHub(Roster.of(["trainer 0", "server 0"]))
