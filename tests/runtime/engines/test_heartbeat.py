"""Who died and who is late: by what ranks say of themselves, and by what the launcher has seen."""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.run_report import step_message
from helpers import job_code, mpiexec
from products import part
from test_run import command, mpi, run, written

from gopt.errors import RunError
from gopt.ir.graph import Node
from gopt.records.mesh import Mesh
from gopt.runtime.engines import heartbeat, launch, launcher_folder, processes, rank_status
from gopt.runtime.engines.base import InProcessStore, run_threads
from gopt.runtime.engines.heartbeat import StatusPublisher
from gopt.runtime.engines.processes import RankProcesses
from gopt.runtime.engines.rank_status import ENDED, REPORTED, RUNNING, WAITING, RankStatus, missing, read, waiting
from gopt.runtime.training.job import StepMessage


def seen(*hows: tuple[int, int, int]) -> list[RankStatus]:
    """What ranks said: how, step, call."""
    return [RankStatus(rank, 100 + rank, step, call, how, 0.0) for rank, (how, step, call) in enumerate(hows)]


@pytest.mark.parametrize(
    ("hows", "said"),
    [
        ([(WAITING, 7, 1), (RUNNING, 7, 0)], "rank 1 did not reach this call: it is in step 8, call 0"),
        ([(WAITING, 7, 1), (RUNNING, 7, -1), (WAITING, 7, 3)], "rank 1 did not reach this call: it is in step 8"),
        ([(WAITING, 7, 1), (ENDED, 7, -1)], "rank 1 did not reach this call: it has ended"),
        ([(WAITING, 7, 1), (RUNNING, 7, 0), (RUNNING, 6, 0), (WAITING, 7, 1)], "ranks 1-2 did not reach this call"),
        (
            [(WAITING, 7, 1), (WAITING, 7, 0)],
            "another rank did not reach this call: rank 1 still waits in step 8, call 0",
        ),
        ([(WAITING, 7, 1), (WAITING, 7, 1), (WAITING, 8, 0)], "another rank did not reach this call"),
    ],
)
def test_who_waits_for_nobody_is_the_one_that_did_not_come(hows, said):
    assert missing(seen(*hows), 0) == said


def test_a_process_that_is_stopped_is_named_though_it_waits():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        said = [RankStatus(0, os.getpid(), 7, 1, WAITING, 0.0), RankStatus(1, child.pid, 7, 1, WAITING, 0.0)]
        assert missing(said, 0) == "another rank did not reach this call"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert missing(said, 0) == "rank 1 did not reach this call: its process is stopped, in step 8, call 1"
    finally:
        child.kill()
        child.wait()


def test_many_are_not_all_listed():
    said = missing(seen((WAITING, 0, 0), *[(RUNNING if rank % 2 else WAITING, 0, 0) for rank in range(500)]), 0)
    assert said.endswith(" and others did not reach this call") and len(said) < 120


def test_where_the_others_waited():
    hows = [(WAITING, 7, 1), (RUNNING, 7, 0), (WAITING, 7, 1), (WAITING, 7, 2), (REPORTED, 7, 2)]
    assert waiting(seen(*hows), 1) == "; ranks 0,2 waited in call 1; rank 3 waited in call 2"


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({1: -9, 0: 1}, "rank 1 was killed by SIGKILL in step 8, call 1; rank 0 waited in call 1"),
        ({0: 1, 1: -11}, "rank 1 was killed by SIGSEGV in step 8, call 1; rank 0 waited in call 1"),
        ({1: -99}, "rank 1 was killed by signal 99 in step 8, call 1; rank 0 waited in call 1"),
        ({0: 7, 1: 7}, "rank 0 exited with code 7 and no message in step 8, call 1; rank 1 waited in call 1"),
        ({2: -9}, "rank 2 was killed by SIGKILL before the first step; ranks 0-1 waited in call 1"),
    ],
)
def test_the_launcher_knows_which_process_was_the_first(codes, said, tmp_path):
    """All ranks are gone when it looks, and all say that they waited in the same call."""
    for each in seen((WAITING, 7, 1), (WAITING, 7, 1)):
        record = rank_status.RECORD.pack(each.process, each.step, each.call, each.how, each.when)
        (tmp_path / f"{each.rank}").write_bytes(record)
    with pytest.raises(RunError) as caught:
        launch._JobMonitor(ended(codes), tmp_path, 1.0, print).run()
    assert caught.value.message == said and caught.value.exit_code == 5
    assert ("memory" in "".join(caught.value.hints)) == ("SIGKILL" in said)


def ended(codes: dict[int, int]) -> RankProcesses:
    """Processes of a job that has ended."""
    return RankProcesses({}, selectors.DefaultSelector(), codes)


def test_a_line_is_shown_once_and_when_it_is_whole(tmp_path):
    shown: list[str] = []
    watchdog = launch._JobMonitor(ended({}), tmp_path, 1.0, shown.append)
    watchdog._tell()
    for text, lines in (("a\nb", ["a"]), ("c\nd\n", ["a", "bc", "d"]), ("", ["a", "bc", "d"])):
        with (tmp_path / launcher_folder.LIVE).open("a") as file:
            file.write(text)
        watchdog._tell()
        assert shown == lines


def test_a_record_is_valid_from_the_first_moment_others_can_read_it(tmp_path, monkeypatch):
    """A launcher that read one of zeros took process 0 for the rank's, and the system refused a handle on it."""
    first: list[list[RankStatus]] = []
    map_file = heartbeat.mmap.mmap

    def read_then_map(*args):
        first.append(read(tmp_path))
        return map_file(*args)

    monkeypatch.setattr(heartbeat.mmap, "mmap", read_then_map)
    number = os.open(tmp_path / "0", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        before = time.time()
        StatusPublisher(number, tmp_path)
    finally:
        os.close(number)
    [[seen_first]] = first
    assert (seen_first.process, seen_first.step, seen_first.call) == (os.getpid(), 0, -1)
    assert before <= seen_first.when <= time.time()


def test_what_a_rank_tells_is_checked():
    line = '{"step": 1, "loss": null, "losses": [null, 1.5], "seconds": 0.5, "samples_per_second": 3}'
    assert step_message(line) == StepMessage(step=1, loss=None, losses=(None, 1.5), seconds=0.5, samples_per_second=3)
    with pytest.raises(RunError, match=r"a message of the first rank: losses\[1\]: 'x' is not of types"):
        step_message(line.replace("1.5", '"x"'))


@pytest.mark.rest
@mpi
@pytest.mark.parametrize(
    ("number", "victim"), part(itertools.product([signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT], [1, 0]), 1)
)
def test_the_rank_that_was_killed_is_named(number, victim, tmp_path):
    """From outside, at any moment, on machines of any speed: whoever it is, its signal, and nobody else."""
    folder = written(tmp_path)
    arguments = command(folder, "faulty_data:batches", 10**6, "--launch", "2", "--log", str(tmp_path / "log"))
    path = {"PYTHONPATH": str(Path(__file__).parents[1]), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(arguments, env={**os.environ, **path}, stderr=subprocess.PIPE, text=True)
    try:
        root = None
        while root is None or not (tmp_path / "log").is_file():
            assert process.poll() is None, process.stderr.read()
            root = next(tmp_path.glob("gopt.*"), None)
        found = {each.rank: each for each in read(root)}
        os.kill(found[victim].process, number)
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 5
    lines = [line for line in errors.splitlines() if line.startswith("gopt: error: ")]
    assert len(lines) == 1 and lines[0].startswith(f"gopt: error: rank {victim} was killed by {number.name} in step ")
    assert f"rank {victim} waited" not in lines[0] and "PID" not in errors


@pytest.mark.rest
@mpi
def test_a_hang_under_a_users_own_launcher_names_the_rank_as_well(tmp_path):
    arguments = command(written(tmp_path), "faulty_data:batches", 500, "--deadline", "120")
    done = run([mpiexec(), "-n", "2", *arguments], "sleep")
    assert job_code(done) == 5
    assert "gopt: error: rank 0, step 8, call 0: after 1.5 s" in done.stderr
    assert "rank 1 did not reach this call: it is in step 8\n" in done.stderr


FIRST = """
import sys
from pathlib import Path
from gopt.runtime.engines.heartbeat import StatusPublisher
from gopt.runtime.engines.rank_status import REPORTED

home = Path(sys.argv[1])
file = (home / "0").open("w+b")
beat = StatusPublisher(file.fileno(), home)
print(beat.first(5), flush=True)
if sys.stdin.readline() == "report\\n":
    beat.at(0, 0, REPORTED)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("ends", ["reports", "dies"])
def test_the_others_wait_until_the_first_has_reported(ends: str, tmp_path: Path) -> None:
    """They end the job next: a first rank that is slow to report would be ended before it has."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        (tmp_path / "1").open("w+b") as file,
        subprocess.Popen([sys.executable, "-P", "-c", FIRST, str(tmp_path)], **pipes) as first,
    ):
        assert first.stdin is not None and first.stdout is not None
        assert first.stdout.readline() == "True\n"
        beat = StatusPublisher(file.fileno(), tmp_path)
        beat.others = lambda: read(tmp_path)
        explained: list[str] = []
        waits = threading.Thread(target=beat.report, args=(3, lambda: explained.append("why")))
        waits.start()
        waits.join(0.5)
        assert waits.is_alive()
        assert [each.how for each in read(tmp_path)] == [RUNNING, RUNNING]
        if ends == "reports":
            first.stdin.write("report\n")
            first.stdin.flush()
        else:
            first.stdin.close()
            first.wait()
        waits.join()
        assert [each.how for each in read(tmp_path)][1] == REPORTED and not explained
        assert launcher_folder.read_claim(tmp_path) == launcher_folder.ErrorClaim(5, first.pid)


def test_heartbeats_without_a_folder_are_seen_by_all(monkeypatch):
    monkeypatch.delenv(launcher_folder.HEARTBEATS, raising=False)
    mesh, met = Mesh.parse("shard=3"), threading.Barrier(3)

    def work(engine):
        beat = StatusPublisher.open(engine.rank, engine.gather)
        beat.at(engine.rank, 5)
        beat.waits(engine.rank != 1)
        met.wait()
        found = beat.others()
        met.wait()
        return [(each.rank, each.step, each.call, each.how) for each in found]

    for found in run_threads(mesh, 600.0, work):
        assert found == [(0, 0, 5, WAITING), (1, 1, 5, RUNNING), (2, 2, 5, WAITING)]


# --- the launcher's folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "marker",
    [None, "folder", "pipe", "", "1", "gopt-launcher", "gopt-launcher 1", "gopt-launcher a b", "x 1 2", b"\xff 1 2"],
)
def test_a_folder_without_a_marker_is_nobodys(marker, tmp_path, monkeypatch):
    """Whoever names the folder: nothing is written there, and nothing removed."""
    path = tmp_path / launcher_folder.LAUNCHER
    if marker == "folder":
        path.mkdir()
    elif marker == "pipe":
        os.mkfifo(path)
    elif marker is not None:
        path.write_bytes(marker if isinstance(marker, bytes) else marker.encode())
    monkeypatch.setenv(launcher_folder.HEARTBEATS, str(tmp_path))
    assert launcher_folder.launcher_folder() is None


@pytest.mark.parametrize("value", ["", "/dev/zero", "/nowhere", "/", "\n", "."])
def test_a_variable_that_names_no_launchers_folder(value, monkeypatch):
    monkeypatch.setenv(launcher_folder.HEARTBEATS, value)
    assert launcher_folder.launcher_folder() is None


def test_a_marked_folder_is_the_launchers(tmp_path, monkeypatch):
    with launcher_folder.marked(tmp_path) as job:
        monkeypatch.setenv(launcher_folder.HEARTBEATS, str(tmp_path))
        assert launcher_folder.launcher_folder() == tmp_path
        found = launcher_folder.read_marker(tmp_path)
    assert found == launcher_folder.Launcher(os.getpid(), launcher_folder.start_of(os.getpid()), job) and found.start


def test_the_next_launcher_removes_what_a_killed_one_has_left_and_nothing_else(tmp_path):
    """A launcher that is killed while MPI starts leaves its folder, and files in shared memory that have its name."""
    folders = {name: tmp_path / f"gopt.{name}" for name in ("dead", "alive", "older", "bare", "mixed")}
    shared = {}
    with contextlib.ExitStack() as running:
        for name, folder in folders.items():
            folder.mkdir()
            (folder / "0").touch()
            if name == "older":
                (folder / launcher_folder.LAUNCHER).write_text("gopt-launcher 1 1")
            elif name != "bare":
                marker = launcher_folder.marked(folder)
                job = running.enter_context(marker) if name == "alive" else left_by(marker)
                shared[name] = Path(f"/dev/shm/mpich_shm_{processes._fnv(job.encode()):x}_0")
                shared[name].touch()
        (folders["mixed"] / "precious").touch()
        (tmp_path / "gopt.link").symlink_to("precious")
        launcher_folder.remove_dead(tmp_path)
    try:
        assert sorted(os.listdir(tmp_path)) == ["gopt.alive", "gopt.bare", "gopt.link", "gopt.mixed", "gopt.older"]
        assert os.listdir(folders["mixed"]) == ["precious"]
        assert [name for name, path in shared.items() if path.exists()] == ["alive"]
    finally:
        shared["alive"].unlink()


def left_by(marker: contextlib.AbstractContextManager[str]) -> str:
    with marker as job:
        return job


FOLLOWS = """
import sys
from pathlib import Path
from gopt.runtime.engines.heartbeat import StatusPublisher
StatusPublisher(None, Path(sys.argv[1])).follow()
"""


@pytest.mark.parametrize("process", ["ended", "another of its number"])
def test_a_rank_without_its_launcher_removes_what_they_wrote_alone(process, tmp_path):
    number = os.getpid()
    if process == "ended":
        with subprocess.Popen(["true"]) as gone:
            number = gone.pid
    for name in ("0", "12", "live", "said", "said.12", "why.12", "why"):
        (tmp_path / name).write_text("")
    (tmp_path / launcher_folder.LAUNCHER).write_text(f"gopt-launcher {number} 1")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "0").write_text("kept")
    (tmp_path / "0.onnx").write_text("kept")
    ended = subprocess.run([sys.executable, "-P", "-c", FOLLOWS, str(tmp_path)], timeout=600)
    assert ended.returncode == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.onnx", "precious"]
    assert (tmp_path / "precious" / "0").read_text() == "kept"


# --- threads --------------------------------------------------------------------------------------------------------


def test_a_thread_that_does_not_come_to_an_agreement_is_named():
    store = InProcessStore(2, 0.1)
    with pytest.raises(RunError, match=r"after 0\.1 s, rank 0 still waits for rank 1 at the ranks' agreement"):
        store.gather(0, None)


def test_a_thread_that_waits_itself_is_not_to_blame():
    """0 waits for 1 along shard, 1 for 3 along dp, which is the one that did not come."""
    mesh, held = Mesh.parse("dp=2,shard=2"), threading.Event()

    def call(engine, group):
        node = Node("AllReduce", ["x"], ["y"], domain="gopt.comm", attributes={"group": group})
        engine.call(0, node, [np.ones(1, np.float32)])

    def work(engine):
        if engine.rank == 1:
            while 0 not in engine.group._waiting:
                time.sleep(0.01)
            time.sleep(0.2)  # so that 0 is the first to find that it takes too long
        if engine.rank == 3:
            held.wait(600)
        if engine.rank < 2:
            call(engine, "dp" if engine.rank == 1 else "shard")

    with pytest.raises(RunError) as caught:
        run_threads(mesh, 1.0, work)
    held.set()
    assert "rank 3" in caught.value.message
