"""Processes of a job on one host: they find each other through their launcher, and nothing listens."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gopt.runtime.engines.processes import RankProcesses, catches

mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")

CALLS = Path(__file__).with_name("call_ranks.py")
TALK = """
import json, os
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
values = np.full(1 << 18, world.rank, np.int64)
world.Allreduce(MPI.IN_PLACE, values)
near = world.Split_type(MPI.COMM_TYPE_SHARED).size
request = world.Isend(values, (world.rank + 1) % world.size)
world.Recv(values, (world.rank - 1) % world.size)
request.Wait()
mine = {os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{each}")}
rows = [line.split() for kind in ("tcp", "tcp6", "udp", "udp6") if os.path.exists(f"/proc/net/{kind}") for line in list(open(f"/proc/net/{kind}"))[1:]]
print(json.dumps([world.size, near, int(values[0]), [row[1] for row in rows if f"socket:[{row[9]}]" in mine]]), flush=True)
world.Barrier()
"""  # noqa: E501


def ran(count: int, *command: str, ended_after: float = 60.0) -> tuple[RankProcesses, list[str]]:
    """A job of so many processes, to its end, and the lines that they printed."""
    with tempfile.TemporaryFile() as out:
        job = RankProcesses.start(count, command, dict(os.environ), out.fileno(), out.fileno())
        until = time.monotonic() + ended_after
        while job.running and time.monotonic() < until:
            job.serve(0.1)
        job.end()
        out.seek(0)
        return job, out.read().decode().splitlines()


@pytest.mark.rest
@mpi
def test_calls_of_three_processes_give_what_the_reference_does(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CALLS.parent), *sys.path]))
    job, lines = ran(3, sys.executable, str(CALLS), "mpi", ended_after=240.0)
    assert not any(job.codes.values()) and int(lines[0]) > 200, "\n".join(lines)


KILLED = """
import os, signal
from mpi4py import MPI
print(next(line.split()[5] for line in open("/proc/self/maps") if "mpich_shm_" in line), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@mpi
def test_a_job_that_is_killed_while_mpi_starts_leaves_no_shared_memory():
    job, [path] = ran(1, sys.executable, "-c", KILLED)
    assert job.codes == {0: -signal.SIGKILL} and not Path(path).exists()


@mpi
@pytest.mark.parametrize("netmod", ["ucx", pytest.param("ofi", marks=pytest.mark.slow)])
def test_processes_find_each_other_and_have_no_socket_of_a_network(netmod, monkeypatch):
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", netmod)
    job, lines = ran(3, sys.executable, "-c", TALK)
    assert job.codes == {0: 0, 1: 0, 2: 0} and job.finalized == {0, 1, 2}, lines
    found = [json.loads(each) for each in "".join(lines).replace("][", "]\n[").splitlines()]  # launchers join lines
    assert [each[:3] for each in found] == [[3, 3, 3]] * 3
    sockets = [address for each in found for address in each[3]]
    assert sockets == [] or (netmod == "ofi" and all(each.startswith("0100007F:") for each in sockets))


@mpi
def test_a_rank_that_ends_the_job_ends_all(capfd):
    script = "from mpi4py import MPI; w = MPI.COMM_WORLD; w.Barrier(); w.rank and w.Abort(5); w.Barrier()"
    job, _ = ran(2, sys.executable, "-c", script)
    assert job.codes == {0: -signal.SIGKILL, 1: 5} and not job.finalized


@pytest.mark.parametrize("sent", [b"", b"junk\ncmd=none\n", b"cmd=get\n", b"\377\n=\n cmd= =\n", b"a" * 200_000])
def test_a_process_that_sends_anything_else_ends_as_it_does(sent):
    script = (
        "import os, sys\ntry: os.write(int(os.environ['PMI_FD']), eval(sys.argv[1]))\nexcept OSError: pass\nos._exit(3)"
    )
    text = "b'a' * 200_000" if len(sent) > 100 else repr(sent)
    job, _ = ran(2, sys.executable, "-S", "-c", script, text)
    assert job.codes == {0: 3, 1: 3} and not job.finalized


def test_a_command_that_cannot_start_leaves_nothing(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="nothing"):
        ran(2, str(tmp_path / "nothing"))
    assert os.listdir("/proc/self/fd") == before


def test_a_stopped_process_is_ended_too():
    job = RankProcesses.start(1, ["sh", "-c", "kill -STOP $$; sleep 1000"], dict(os.environ), 1, 2)
    job.serve(0.1)
    job.end()
    assert job.codes == {0: -signal.SIGKILL}


def test_whether_a_process_has_a_handler_is_seen():
    def other(*_):
        pass

    assert not catches(os.getpid(), signal.SIGHUP) and not catches(2**22 + 1, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, other)
    try:
        assert catches(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert Path("/proc/self/status").is_file()
