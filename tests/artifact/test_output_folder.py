"""A folder that appears whole, or not at all."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from gopt.artifact.output_folder import output_folder
from gopt.errors import OptionError, RunError, StoppedError
from gopt.system.files import write_new


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fill(path: Path) -> None:
    write_new(path / "file", b"new")


def test_it_appears_at_the_end():
    with output_folder(Path("a/b/out"), force=False) as path:
        fill(path)
        assert os.listdir("a/b") == [path.name] and path.name.startswith(".out.gopt-")
    assert Path("a/b/out/file").read_bytes() == b"new" and os.listdir("a/b") == ["out"]


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        (lambda: 1 / 0, ZeroDivisionError),
        (interrupt, KeyboardInterrupt),
        (lambda: signal.raise_signal(signal.SIGTERM), StoppedError),
    ],
    ids=["error", "interrupt", "signal"],
)
def test_nothing_is_left_of_a_block_that_fails(fail: Callable[[], object], error: type[BaseException]):
    with pytest.raises(error), output_folder(Path("out"), force=False) as path:
        fill(path)
        fail()
    assert os.listdir() == []


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, "the disk is full"), (errno.EROFS, "Read-only")])
def test_what_the_disk_refuses_is_a_failed_run(number, said):
    with (
        pytest.raises(RunError, match=f"cannot write out: {said}") as caught,
        output_folder(Path("out"), force=False),
    ):
        raise OSError(number, os.strerror(number))
    assert caught.value.hints == ("nothing was left behind",) and os.listdir() == []


def test_a_folder_that_was_made_meanwhile_stays():
    with pytest.raises(OptionError, match="out exists already"), output_folder(Path("out"), force=False) as path:
        fill(path)
        Path("out").mkdir()
        Path("out/mine").touch()
    assert os.listdir() == ["out"] and os.listdir("out") == ["mine"]


def test_force_takes_an_empty_folder():
    Path("out").mkdir()
    with output_folder(Path("out"), force=True) as path:
        fill(path)
    assert os.listdir("out") == ["file"] and os.listdir() == ["out"]
