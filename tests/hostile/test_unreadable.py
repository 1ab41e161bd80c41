"""Files that this user may not read: exit 3 with the file's name, from every command that reads them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import part

NOBODY = 65534
COMMANDS = {
    "inspect": ["inspect", "ranks"], "verify": ["verify", "ranks", "--steps", "1", "--no-confirm"],
    "merge": ["merge", "ranks", "-o", "m.onnx", "--force"],
    "reshard": ["reshard", "ranks", "--ranks", "3", "-o", "r.ranks", "--force"],
    "run": ["run", "ranks", "--data", "data.npz", "--set", "lr=0.1", "--steps", "1"],
    "report": ["report", "ranks", "--html", "p.html", "--force"], "diff": ["diff", "ranks", "other"],
    "explain": ["explain", "ranks", "fc1.weight"], "shard": ["shard", "step.onnx", "--ranks", "2", "--dry-run"],
    "model": ["inspect", "step.onnx"],
}  # fmt: skip
READ = {
    "manifest.json": ["inspect", "verify", "merge", "reshard", "run", "report", "diff", "explain"],
    "report.json": ["inspect", "verify", "merge", "reshard", "report", "diff", "explain"],
    "source.onnx": ["verify", "merge", "reshard", "report", "diff", "explain"],
    "states.bin": ["verify", "merge", "reshard", "run", "report", "diff"],
    "rank_0000.onnx": ["verify", "merge", "reshard", "run", "diff"],
    "step.onnx": ["shard", "model"],
}


@pytest.fixture(scope="module")
def here() -> Iterator[Path]:
    """A folder that everybody may write to, which pytest's are not. Each command has run: all that it imports is there,
    and another user may be unable to read modules."""
    folder, before = Path(tempfile.mkdtemp()), Path.cwd()
    os.chmod(folder, 0o777)
    os.chdir(folder)
    shutil.copy(FIXTURES / "mlp_sgd.onnx", "step.onnx")
    np.savez("data.npz", x=np.zeros((64, 32), np.float32), y=np.zeros(64, np.int64))
    for name in ("ranks", "other"):
        assert main(["shard", "step.onnx", "--ranks", "2", "-o", name]) == 0
    for arguments in COMMANDS.values():
        assert main(arguments) == 0
    for made in ("m.onnx", "r.ranks", "p.html"):
        shutil.rmtree(made) if Path(made).is_dir() else Path(made).unlink()
    yield folder
    os.chdir(before)
    shutil.rmtree(folder)


def as_another_user(arguments: list[str]) -> int:
    child = os.fork()
    if not child:
        code = 99
        try:
            if os.geteuid() == 0:  # who may read everything
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            code = main(arguments)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("name", "command"), part([(name, each) for name, commands in READ.items() for each in commands], 17)
)
def test_a_file_that_may_not_be_read(name, command, here, capfd):
    path = here / (name if name == "step.onnx" else f"ranks/{name}")
    path.chmod(0)
    try:
        assert as_another_user(COMMANDS[command]) == 3
    finally:
        path.chmod(0o644)
    line = capfd.readouterr().err.splitlines()[0]
    assert line.startswith("gopt: error: ") and name in line and "cannot be read: Permission denied" in line
    assert not {"m.onnx", "r.ranks", "p.html"} & set(os.listdir(here))


@pytest.mark.parametrize("mode", [0o000, 0o600])
@pytest.mark.parametrize("command", [each for each in COMMANDS if "ranks" in COMMANDS[each]])
def test_a_folder_that_may_not_be_read(command, mode, here, capfd):
    """It ended with 5, as a target does that cannot be written."""
    (here / "ranks").chmod(mode)
    try:
        code = as_another_user(COMMANDS[command])
    finally:
        (here / "ranks").chmod(0o755)
    assert code == 3
    line = capfd.readouterr().err.splitlines()[0]
    assert line.startswith("gopt: error: ") and "ranks" in line and "cannot be read: Permission denied" in line
    assert not {"m.onnx", "r.ranks", "p.html"} & set(os.listdir(here))


def test_a_target_that_may_not_be_written_is_no_bad_input(here, capfd):
    (here / "shut").mkdir(mode=0o700)
    assert as_another_user(["merge", "ranks", "-o", "shut/m.onnx"]) == 5
    assert "cannot write shut/m.onnx: Permission denied" in capfd.readouterr().err
