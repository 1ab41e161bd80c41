"""Faults of trainers and servers that are processes: one is killed or asked to end in the midst of a run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import mpiexec, source

from gopt import api
from gopt.artifact.checkpoint_index import complete_steps
from gopt.artifact.server_entries import Mode
from gopt.parameter_server.options import SplitOptions
from gopt.runtime.parameter_server.outlive import ended_together

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs pip install 'gopt[mpi]'")


def split(home: Path, **options: object) -> Path:
    random = np.random.default_rng(3)
    np.savez(home / "data.npz", x=random.normal(size=(64, 32)).astype("f4"), y=random.integers(0, 10, 64))
    given = SplitOptions(**{"trainers": 2, "servers": 1, "minimum": 16, **options})  # type: ignore[arg-type]
    api.split(source("mlp_adamw"), given).write(home / "split")
    return home / "split"


def command(folder: Path, steps: int, *more: str) -> list[str]:
    return [
        sys.executable, "-P", "-m", "gopt.cli", "run", str(folder), "--data", str(folder.parent / "data.npz"),
        "--steps", str(steps), "--set", "lr=1e-3", "--log", str(folder.parent / "log"), *more,
    ]  # fmt: skip


def process_of(home: Path, rank: int) -> int:
    """The number of a role's process, as it says itself."""
    folder = next(each for each in home.iterdir() if each.name.startswith("gopt."))
    return int(struct.unpack("<qqqqd", (folder / str(rank)).read_bytes())[0])


def disturbed(
    folder: Path,
    steps: int,
    hit: Callable[[Path, int], None],
    *more: str,
    seen: int = 3,
    launcher: Sequence[str] = (),
) -> tuple[int, list[str], list[dict[str, object]]]:
    """Run, and do something once some steps are told: the exit code, lines on stderr, and steps. Nothing stays.

    What never comes ends by the time limit of the tests: nothing here depends on how fast the machine is.
    """
    home = folder.parent / "tmp"
    home.mkdir()
    log = folder.parent / "log"
    begun = subprocess.Popen(
        [*launcher, *command(folder, steps, *more)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "TMPDIR": str(home)},
    )  # fmt: skip
    try:
        while not (log.is_file() and log.read_bytes().count(b"\n") >= seen):
            assert begun.poll() is None, begun.communicate()[1]
            time.sleep(0.02)
        opened = [name for each in below(begun.pid) for name in shared_files(each)]
        hit(home, begun.pid)
        said = begun.communicate()[1].splitlines()
    finally:
        begun.kill()
    assert not list(home.glob("gopt.*")) and not command_lines(str(folder))
    assert opened and not [name for name in opened if os.path.exists(name)]
    return begun.returncode, said, [json.loads(line) for line in log.read_text().splitlines()]


def command_lines(part: str) -> list[str]:
    """Of all processes, those that have this in their command."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = each.read_text()
        except OSError:
            continue
        found += [text] * (part in text)
    return found


def below(number: int) -> list[int]:
    """A process and all that it has started, parents first."""
    found = [number]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def shared_files(number: int) -> list[str]:
    """The files of shared memory that a process has mapped, whether they still have a name or not."""
    lines = Path(f"/proc/{number}/maps").read_text().splitlines()
    found = {line.split(maxsplit=5)[5].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line}
    return sorted(found)


def kill_below(rank: int) -> Callable[[Path, int], None]:
    """Kill the process that works as a rank of a launcher: the last in the row of those that it started for it."""

    def hit(_: Path, launcher: int) -> None:
        wanted = f"PMI_RANK={rank}".encode()
        mine = [each for each in below(launcher) if wanted in Path(f"/proc/{each}/environ").read_bytes().split(b"\0")]
        os.kill(mine[-1], signal.SIGKILL)

    return hit


def kill(*ranks: int, by: signal.Signals = signal.SIGKILL) -> Callable[[Path, int], None]:
    """Kill processes in one moment: none of them runs any more when the first is killed."""

    def hit(home: Path, _: int) -> None:
        numbers = [process_of(home, rank) for rank in ranks]
        for step in (signal.SIGSTOP, by, signal.SIGCONT):
            for number in numbers:
                with contextlib.suppress(ProcessLookupError):  # SIGKILL needs no SIGCONT
                    os.kill(number, step)

    return hit


@pytest.mark.rest
@pytest.mark.parametrize(
    ("rank", "by", "said"),
    [
        (1, signal.SIGSEGV, r"trainer 1 .* killed by SIGSEGV; (server|trainer) 0 .* waited for .* (round|step) \d+"),
        pytest.param(
            2, signal.SIGKILL, r"server 0 .* killed by SIGKILL; trainer . .* waited for server 0 .* (round|step) \d+",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_who_is_killed_is_named_in_one_line(rank: int, by: signal.Signals, said: str, tmp_path: Path) -> None:
    code, lines, _ = disturbed(split(tmp_path), 10**6, kill(rank, by=by), "--launch", "3")
    assert code == 5 and len(lines) == 1 and re.search(said, lines[0]), lines


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SYNC])
def test_the_others_go_on_without_a_trainer(mode: Mode, tmp_path: Path) -> None:
    more = ["--on-trainer-loss", "continue"] if mode is Mode.SYNC else []
    folder = split(tmp_path, mode=mode)
    code, lines, steps = disturbed(folder, 1000, kill(1), "--launch", "3", *more)
    assert code == 0 and [each["step"] for each in steps] == list(range(1, 1001)), lines
    assert [line for line in lines if "trainer 1 (endpoint 1, process 1) is lost in step" in line], lines
    assert not [line for line in lines if "error" in line]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.SYNC])
def test_one_trainer_goes_on_when_two_are_killed_in_one_moment(mode: Mode, tmp_path: Path) -> None:
    more = ["--on-trainer-loss", "continue"] if mode is Mode.SYNC else []
    folder = split(tmp_path, mode=mode, trainers=3, servers=2)
    code, lines, steps = disturbed(folder, 250, kill(1, 2), "--launch", "5", *more)
    assert code == 0 and [each["step"] for each in steps] == list(range(1, 251)), lines
    for number in (1, 2):
        lost = f"trainer {number} (endpoint {number}, process {number}) is lost in step"
        assert [line for line in lines if lost in line], lines
    assert not [line for line in lines if "error" in line]


@pytest.mark.slow
def test_two_that_are_killed_in_one_moment_end_a_run_in_rounds(tmp_path: Path) -> None:
    folder = split(tmp_path, trainers=3, servers=2)
    code, lines, _ = disturbed(folder, 10**6, kill(1, 2), "--launch", "5")
    assert code == 5 and len(lines) == 1, lines
    assert re.search(r"trainer [12] \(endpoint ., process .\) is lost: ", lines[0]), lines


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
def test_the_others_go_on_under_a_launcher_that_leaves_them_alone(mode: Mode, tmp_path: Path) -> None:
    folder = split(tmp_path, mode=mode)
    launcher = [mpiexec(), "-disable-auto-cleanup", "-n", "3"]
    more = ["--on-trainer-loss", "continue"] if mode is Mode.SYNC else []
    code, lines, steps = disturbed(folder, 300, kill_below(1), *more, launcher=launcher)
    assert code == 128 + signal.SIGKILL and [each["step"] for each in steps] == list(range(1, 301)), lines
    assert [line for line in lines if "trainer 1 (endpoint 1, process 1) is lost in step" in line], lines


def test_a_launcher_that_ends_all_is_refused_with_what_to_type(tmp_path: Path) -> None:
    launched = [mpiexec(), "-n", "3", *command(split(tmp_path), 3, "--on-trainer-loss", "continue")]
    done = subprocess.run(launched, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert "--on-trainer-loss continue: this mpiexec ends all processes when one dies" in done.stderr
    assert "start it with mpiexec -disable-auto-cleanup -n 3 gopt run …, or with gopt run … --launch 3" in done.stderr
    assert done.returncode == 2


PROXY = ["/opt/bin/hydra_pmi_proxy", "--control-port", "host:1"]


@pytest.mark.parametrize(
    ("above", "ends"),
    [
        ([["sh"], PROXY, ["/opt/bin/mpiexec", "-n", "3", "gopt"]], True),
        ([["sh"], PROXY, ["mpiexec.hydra", "-disable-auto-cleanup", "-n", "3", "gopt"], ["bash"]], False),
        ([PROXY, ["mpirun", "-n", "3"]], True),
        ([PROXY, ["sshd"], ["init"]], None),  # another host's
        ([["slurmstepd: [1.0]"]], None),
        ([["bash"], ["mpiexec-lookalike"]], None),
    ],
)
def test_what_a_launcher_does_about_a_death_is_seen_in_its_command(above: list[list[str]], ends: bool | None) -> None:
    assert ended_together(above) is ends


@pytest.mark.slow
def test_a_killed_server_goes_on_from_its_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    whole.mkdir()
    hit.mkdir()
    subprocess.run(command(split(whole), 400), check=True, capture_output=True)
    folder = split(hit)
    kept = ["--launch", "3", "--checkpoint", str(hit / "kept"), "--every", "5"]
    code, _, _ = disturbed(folder, 400, kill(2), *kept, seen=7)
    done = complete_steps(hit / "kept")[-1]
    assert code == 5 and 5 <= done < 400
    subprocess.run([*command(folder, 400, *kept), "--resume"], check=True, capture_output=True)
    rows = [json.loads(line) for line in (hit / "log").read_text().splitlines()]
    losses = {each["step"]: each["losses"] for each in rows}
    assert losses == {
        each["step"]: each["losses"] for each in map(json.loads, (whole / "log").read_text().splitlines())
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_the_step_on_all_endpoints(number: signal.Signals, tmp_path: Path) -> None:
    folder, kept = split(tmp_path), tmp_path / "kept"
    code, lines, steps = disturbed(
        folder, 10**6, lambda _, pid: os.kill(pid, number), "--launch", "3", "--checkpoint", str(kept)
    )
    last = complete_steps(kept)
    assert code == 128 + number and len(last) == 1 and last[0] == steps[-1]["step"], lines
    files = {each.name for each in (kept / f"step_{last[0]:08d}").iterdir()}
    assert files >= {"index.json", "rank_0000.safetensors", "rank_0002.safetensors"}
