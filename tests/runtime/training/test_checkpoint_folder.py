"""A folder of checkpoints: one job at a time, only ever added to, and nothing of the user's lost in it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from products import part, spread
from recipes import Recipe, build

import gopt.runtime.training.checkpoint_folder as home
from gopt.system.lock import lock_file
from gopt.system.staging import replace_file

LONG = 300.0
"""Seconds that nothing takes, on however busy a machine."""
RUN = ["run", "out", "--data", "data.npz", "--set", "lr=0.01", "--checkpoint", "ck"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(home, "INLINE", 16)
    Path("step.onnx").write_bytes(build(Recipe(widths=(3, 4, 2), frozen=0)).SerializeToString())
    assert main(["shard", "step.onnx", "--ranks", "2", "-o", "out"]) == 0
    generator = np.random.default_rng(0)
    np.savez("data.npz", x=generator.standard_normal((64, 3), "f4"), y=generator.standard_normal((64, 2), "f4"))


def train(steps: int, *more: str) -> int:
    return main([*RUN, "--steps", str(steps), *more])


def refused(code: int, wanted: int, capsys: pytest.CaptureFixture[str], *words: str) -> None:
    error = capsys.readouterr().err
    assert code == wanted, error
    [line] = [each for each in error.splitlines() if each.startswith("gopt: error:")]
    assert all(word in line for word in words), line


def shared() -> dict[str, tuple[bytes, int]]:
    """Files beside the steps: what is in them, and which they are."""
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in Path("ck").iterdir() if path.is_file()}


def test_what_is_equal_is_left_alone():
    assert train(2) == 0
    kept = shared()
    assert len([name for name in kept if name.endswith(".bin")]) == 1
    assert train(3, "--resume") == 0 and shared() == kept


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_is_moved_away_meanwhile_is_noticed(replaced, monkeypatch, capsys):
    """Steps that stand without a manifest and a source could not be merged."""
    lines = [
        "import os, threading", "turn = threading.Lock()", "def rate(step):", "    with turn:",
        "        if step == 2 and not os.path.exists('moved'):", "            os.rename('ck', 'moved')",
        *(["            os.mkdir('ck')"] if replaced else []), "    return 0.01",
    ]  # fmt: skip
    Path("rate.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.delitem(sys.modules, "rate", raising=False)
    run = ["lr=rate:rate" if each.startswith("lr=") else each for each in RUN]
    code = main([*run, "--steps", "4", "--every", "1"])
    refused(code, 5, capsys, "cannot write checkpoint", "its folder was moved away or replaced")
    assert not Path("ck", "step_00000003").exists() and Path("moved", "step_00000002", "index.json").is_file()


@pytest.mark.parametrize(
    ("name", "damage"),
    spread(["manifest.json", "report.json", "source.onnx", "source.bin"], ["cut", "lost", "changed", "link"], keep=2),
)
def test_a_damaged_shared_file_is_restored(name, damage):
    assert train(2) == 0
    kept = {name: data for name, (data, _) in shared().items()}
    path = next(Path("ck").glob(name.replace("source.bin", "source.*.bin")))
    data = path.read_bytes()
    path.unlink()
    victim = Path("victim")
    victim.write_text("mine")
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "changed":
        path.write_bytes(data.replace(b'"', b"'", 1) if name == "report.json" else data[:-1] + b" ")
    elif damage == "link":
        path.symlink_to(victim.absolute())
    assert train(3, "--resume") == 0
    assert {name: data for name, (data, _) in shared().items()} == kept
    assert victim.read_text() == "mine" and not any(path.is_symlink() for path in Path("ck").iterdir())


def test_another_ranks_checkpoints_are_not_taken_over(capsys):
    assert train(2) == 0
    Path("ck/manifest.json").unlink()
    assert main(["shard", "step.onnx", "--ranks", "2", "--stage", "0", "-o", "out", "--force"]) == 0
    before = shared()
    refused(train(3, "--resume"), 5, capsys, "was written by ranks of another folder")
    assert shared() == before


def test_a_damaged_output_folder_damages_no_checkpoint(capsys):
    assert train(2) == 0
    kept = shared()
    Path("out/report.json").write_text("{")
    refused(train(3, "--resume"), 3, capsys, "out/report.json")
    assert shared() == kept


def test_what_the_user_keeps_beside_a_step_stays():
    assert train(1) == 0
    Path("ck/step_00000001/notes.txt").write_text("mine")
    Path("ck/notes.txt").write_text("mine")
    assert train(4, "--resume", "--every", "1", "--keep", "1") == 0
    assert os.listdir("ck/step_00000001") == ["notes.txt"] and Path("ck/notes.txt").exists()
    assert sorted(path.name for path in Path("ck").glob("step_*")) == ["step_00000001", "step_00000004"]


def test_a_step_that_could_not_be_written_is_told_before_the_first(capsys):
    Path("ck/step_00000003").mkdir(parents=True)
    Path("ck/step_00000003/notes.txt").write_text("mine")
    refused(train(3), 5, capsys, "step_00000003", "'notes.txt'")


@pytest.mark.parametrize("written", [".gopt.lock", "source.onnx", "report.json", "manifest.json"])
@pytest.mark.parametrize("there", [False, True])
def test_nothing_stays_where_nothing_could_be_written(written, there, monkeypatch, capsys):
    """The lock, and the files before the one for which there was no room, stayed."""
    if there:
        Path("ck").mkdir()
        Path("ck/notes.txt").write_text("mine")

    def full(path: Path, *rest: object) -> object:
        if path.name == written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return lock_file(path) if path.name == ".gopt.lock" else replace_file(path, *rest)

    monkeypatch.setattr(home, "replace_file", full)
    monkeypatch.setattr(home, "lock_file", full)
    assert train(1) == 5
    error = capsys.readouterr().err
    assert "the disk is full" in error and "nothing was written" in error
    assert [path.name for path in Path().glob("ck/*")] == ["notes.txt"] * there and Path("ck").exists() is there
    monkeypatch.setattr(home, "replace_file", replace_file)
    monkeypatch.setattr(home, "lock_file", lock_file)
    assert train(1) == 0


def test_a_lock_that_is_a_link_is_not_followed(capsys):
    Path("ck").mkdir()
    Path("ck/.gopt.lock").symlink_to(Path("victim").absolute())
    refused(train(1), 5, capsys, "ck")
    assert not Path("victim").exists()


def test_checkpoints_lie_in_no_output_folder(capsys):
    for where in ("out/ck", "out/a/b"):
        refused(main([*RUN, "--steps", "1", "--checkpoint", where]), 2, capsys, "is inside", "out")
    shutil.copytree("out", "other")
    refused(main([*RUN, "--steps", "1", "--checkpoint", "other"]), 2, capsys, "other is an output folder")
    assert "ck" not in os.listdir("out")


# --- one job at a time ----------------------------------------------------------------------------------------------


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    """Another process that trains, and keeps a step now and then."""
    command = [sys.executable, "-m", "gopt.cli", *RUN, "--steps", "10000000", "--every", "50", "--keep", "9999"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + LONG
    while not list(Path("ck").glob("step_*")):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", part([signal.SIGKILL, signal.SIGTERM], 1))
def test_a_second_job_is_refused_until_the_first_has_ended(number, job, capsys):
    refused(train(10, "--resume"), 5, capsys, "another job writes checkpoints into ck")
    assert job.poll() is None
    job.send_signal(number)
    assert job.wait(LONG) == (-number if number == signal.SIGKILL else 128 + number)
    newest = max(int(path.name[5:]) for path in Path("ck").glob("step_*") if (path / "index.json").is_file())
    assert train(newest + 1, "--resume") == 0


def test_jobs_on_two_folders_do_not_meet(job):
    assert main([*RUN[:-1], "other", "--steps", "2"]) == 0


# --- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", part([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], 1))
def test_a_signal_lets_the_step_end_and_keeps_it(number, job):
    job.send_signal(number)
    _, errors = job.communicate(timeout=LONG)
    assert job.returncode == 128 + number
    lines = errors.splitlines()
    assert lines[1] == f"gopt: error: stopped by {number.name}", errors
    newest = max(int(path.name[5:]) for path in Path("ck").glob("step_*"))
    assert f"step {newest} is kept" in lines[2]
    assert json.loads(Path(f"ck/step_{newest:08d}/index.json").read_text())["step"] == newest
    assert not [path for path in Path("ck").iterdir() if ".new" in path.name]
    assert train(newest + 2, "--resume") == 0


@pytest.mark.parametrize("turns", [(0, 3), pytest.param(range(8), marks=pytest.mark.slow)])
def test_no_interrupt_aborts_the_interpreter(turns):
    """Ranks are left in native code when it ends: three of thirty aborted there."""
    command = [sys.executable, "-m", "gopt.cli", *RUN[:-2], "--steps", "10000000", "--log", "log"]
    for turn in turns:
        Path("log").unlink(missing_ok=True)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + LONG
        while not (Path("log").is_file() and Path("log").stat().st_size):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.01)
        time.sleep(0.01 * turn)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LONG)
        assert (process.returncode, errors.strip()) == (130, "gopt: error: interrupted")
