"""Ordinary conditions: names that are too long, full disks, closed streams, other encodings, folders that are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import part

MODEL = str(FIXTURES / "mlp_sgd.onnx")
LONG = "x" * 256
PLAIN = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(folder / "out")]) == 0
    np.savez(folder / "d.npz", x=np.zeros((64, 32), "f4"), y=np.zeros(64, "i8"))
    return folder


def gopt(*arguments: str, **given: object) -> subprocess.CompletedProcess[bytes]:
    env = os.environ | {"OMP_NUM_THREADS": "1"} | given.pop("env", {})  # type: ignore[operator]
    given.setdefault("stdout", subprocess.PIPE)
    return subprocess.run([sys.executable, "-m", "gopt.cli", *arguments], stderr=subprocess.PIPE, env=env, **given)  # type: ignore[call-overload,no-any-return]


def training(made: Path, *more: str) -> list[str]:
    return ["run", str(made / "out"), "--data", str(made / "d.npz"), "--steps", "1", "--set", "lr=1", *more]


COMMANDS = {
    "inspect": (["inspect", LONG], 3), "text": (["inspect", "--text", LONG], 3), "diff": (["diff", LONG, MODEL], 3),
    "verify": (["verify", LONG], 3), "plan": (["plan", LONG, "--ranks", "2"], 3),
    "merge": (["merge", LONG, "-o", "m.onnx"], 3), "config": (["shard", MODEL, "--config", LONG], 3),
    "shard -o": (["shard", MODEL, "--ranks", "2", "-o", LONG], 5), "merge -o": (["merge", "OUT", "-o", LONG], 5),
    "checkpoint": (["RUN", "--checkpoint", LONG], 5), "log": (["RUN", "--log", LONG], 5),
}  # fmt: skip


@pytest.mark.parametrize("what", COMMANDS)
def test_a_name_that_is_too_long(what, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (first, *rest), code = COMMANDS[what]
    arguments = [*training(made), *rest] if first == "RUN" else [first, *rest]
    assert main([str(made / "out") if each == "OUT" else each for each in arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("gopt: error: ") and "File name too long" in error and "xxxx" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", part(["closed", "full"], 1))
def test_output_that_cannot_be_written(how):
    """A whole process, to its end; ``tests/system/streams.py`` has all commands."""
    with open("/dev/full", "wb") as full:
        given = {"stdout": full} if how == "full" else {"preexec_fn": lambda: os.close(1), "stdout": None}
        ended = gopt("passes", **given)
    said = ended.stderr.decode()
    assert (ended.returncode, said.count("\n")) == (5, 1)
    assert "cannot write the output: stdout: " in said


def test_a_pipe_that_does_not_wait():
    """As another program has left it: what the reader has not yet taken is waited for."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    begun = subprocess.Popen([sys.executable, "-m", "gopt.cli", "passes", "--json"], stdout=write)
    os.close(write)
    with open(read, "rb") as file:
        assert json.loads(file.read())
    assert begun.wait() == 0


def test_closed_streams_are_taken_by_no_file(tmp_path):
    def close() -> None:
        for number in range(3):
            os.close(number)

    gopt("shard", MODEL, "--ranks", "2", "-o", "out", preexec_fn=close, cwd=tmp_path, stdout=None)
    assert b"gopt" not in (tmp_path / "out/states.bin").read_bytes()
    assert json.loads((tmp_path / "out/report.json").read_text())["mesh"]["ranks"] == 2


@pytest.mark.parametrize("option", ["--log", "--trace"])
def test_a_log_on_a_full_disk(option, made, capsys):
    assert main(training(made, option, "/dev/full")) == 5
    assert "cannot write /dev/full: " in capsys.readouterr().err


def test_nobody_reads():
    """As under ``| head``: the command has its own exit code, and no error."""
    read, write = os.pipe()
    os.close(read)
    ended = gopt("diff", MODEL, str(FIXTURES / "mlp_adamw.onnx"), stdout=write)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.rest
@pytest.mark.parametrize("more", part([[], ["--json"]], 1))
def test_characters_that_the_terminal_has_not(more, tmp_path):
    ended = gopt("shard", MODEL, "--ranks", "2", "-o", "n\u00e9", *more, env=PLAIN, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.isascii()
    if more:
        json.loads(ended.stdout)
    else:
        assert b" x minimum" in ended.stdout and rb"written to n\udcc3\udca9" in ended.stdout
    for arguments in (
        (["inspect", "n\u00e9", "--json"],) if more else (["inspect", "n\u00e9"], ["verify", "n\u00e9", "--steps", "1"])
    ):
        assert gopt(*arguments, env=PLAIN, cwd=tmp_path).returncode == 0


def gone(folder: Path) -> Callable[[], None]:
    def away() -> None:
        folder.mkdir()
        os.chdir(folder)
        folder.rmdir()

    return away


@pytest.mark.rest
def test_a_folder_to_run_in_that_is_gone(made, tmp_path):
    away = gone(tmp_path / "gone")
    out = str(tmp_path / "out")
    for arguments in (["shard", MODEL, "--ranks", "2", "-o", out], ["inspect", out]):
        assert gopt(*arguments, preexec_fn=away).returncode == 0, arguments
    ended = gopt("shard", MODEL, "--ranks", "2", "-o", "new", preexec_fn=away)
    assert ended.returncode == 5 and b"cannot write new: No such file" in ended.stderr
    assert gopt("inspect", "m.onnx", preexec_fn=away).returncode == 3


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_prints_where_no_folder_can_be(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run", "--print-after", "all", "--print-dir", place]) == 2
    assert f"--print-dir {place} cannot be a folder" in capsys.readouterr().err


def test_what_the_system_refuses_is_no_defect(monkeypatch, capsys):
    import gopt.steps.source

    def broken(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr(gopt.steps.source, "load", broken)
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run"]) == 5
    assert capsys.readouterr().err == "gopt: error: 'some/file': Permission denied\n"
