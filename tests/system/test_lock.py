"""Locks that end with their process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gopt.system import lock
from gopt.system.lock import LockState, is_locked, lock_existing, lock_file, try_lock


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_one_at_a_time():
    path = Path("lock")
    assert not is_locked(path), "where there is no file"
    number = lock_file(path)
    assert number is not None and is_locked(path) and lock_file(path) is None
    os.close(number)
    assert not is_locked(path) and path.exists()


def test_a_file_that_its_job_removed_is_no_lock(monkeypatch):
    """A job that could write nothing removes its lock: one who opened the file before would lock a file of no name."""
    path = Path("lock")
    first = lock_file(path)

    def ended(number: int, how: int = 0) -> LockState:
        if path.exists() and os.path.samestat(os.fstat(first), os.stat(path)):
            path.unlink()
        return try_lock(number, how) if how else LockState.MINE

    monkeypatch.setattr(lock, "try_lock", ended)
    second = lock_file(path)
    assert second is not None and lock.is_at(second, path)
    os.close(first)
    os.close(second)


def test_those_who_look_do_not_meet():
    """A shared lock: one who looks does not seem to be a job to another who looks."""
    Path("lock").touch()
    with open("lock", "rb") as file:
        assert try_lock(file.fileno(), lock.fcntl.LOCK_SH) is LockState.MINE
        assert not is_locked(Path("lock"))


def test_a_lock_ends_with_its_process():
    code = (
        "import os, sys; from pathlib import Path; from gopt.system.lock import lock_file; "
        "lock_file(Path('lock')); print('held', flush=True); sys.stdin.read(); os._exit(1)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        assert lock_file(Path("lock")) is None
        other.communicate()
    number = lock_file(Path("lock"))
    assert number is not None
    os.close(number)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_file_is_locked(kind):
    path = Path("lock")
    if kind == "link":
        path.symlink_to("victim")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):
        lock_file(path)
    assert len(os.listdir("/proc/self/fd")) == before and not Path("victim").exists()


def test_what_lies_there_is_locked():
    assert lock_existing(Path("nowhere")) is None
    Path("folder").mkdir()
    held = lock_existing(Path("folder"))
    assert held is not None and held[1] is LockState.MINE
    other = lock_existing(Path("folder"))
    assert other is not None and other[1] is LockState.BUSY
    for number, _ in (held, other):
        os.close(number)


@pytest.mark.parametrize("then", ["gone", "another"])
def test_what_was_moved_away_meanwhile_is_not_held(then, monkeypatch):
    """Between the open and the lock: the lock would be of what lies elsewhere."""
    path = Path("folder")
    path.mkdir()
    real = lock.try_lock

    def late(number: int) -> LockState:
        path.rename("moved")
        if then == "another":
            path.mkdir()
        return real(number)

    monkeypatch.setattr(lock, "try_lock", late)
    before = len(os.listdir("/proc/self/fd"))
    assert lock_existing(path) is None
    assert len(os.listdir("/proc/self/fd")) == before
