"""Drafts: nobody foresees their names, and those that a dead process left are swept away or put back."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gopt.cli.main import main
from helpers import FIXTURES

from gopt.artifact.output_folder import output_folder
from gopt.errors import RunError
from gopt.system import rename, staging_names
from gopt.system.staging import create_staged, staged_folder, sweep

MODEL = str(FIXTURES / "mlp_sgd.onnx")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out"]) == 0


def shard(*more: str) -> int:
    return main(["shard", MODEL, "--ranks", "3", "-o", "out", *more])


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_and_links_under_likely_names_stay():
    """Those that drafts had before: a link under one led to another file that was written over."""
    victim = Path("victim")
    victim.write_text("mine")
    planted = [Path(f".m.onnx{end}") for end in (".tmp", ".data.tmp", ".new", "~")]
    for path in planted[:2]:
        path.symlink_to(victim)
    for path in planted[2:]:
        path.write_text("mine")
    assert main(["merge", "out", "-o", "m.onnx"]) == 0
    assert all(path.read_text() == "mine" for path in (victim, *planted))


def test_names_of_drafts_cannot_be_foreseen(monkeypatch):
    """And what lies under one all the same is neither followed nor replaced."""
    assert len({staging_names.fresh_name(Path("a/out")) for _ in range(100)}) == 100
    monkeypatch.setattr(staging_names.secrets, "token_hex", lambda size: "0" * 2 * size)
    Path(".m.onnx.gopt-0000000000000000.new").symlink_to("victim")
    assert main(["merge", "out", "-o", "m.onnx"]) == 5
    assert not Path("victim").exists() and not Path("m.onnx").exists()


def test_a_draft_in_work_is_not_swept_away():
    with staged_folder(Path("new").absolute()) as draft:
        (draft.path / "file").write_text("work")
        sweep(Path())
        assert main(["shard", MODEL, "--ranks", "2", "-o", "new"]) == 0
        assert (draft.path / "file").read_text() == "work"
    assert sorted(os.listdir()) == ["new", "out"]


def left_behind(name: str) -> Path:
    """A draft of a process that died with it."""
    child = os.fork()
    if child == 0:
        try:
            draft = create_staged(Path(name).absolute(), os.mkdir)
            (draft.path / "rank_0000.onnx").write_text("")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    [draft] = staging_names.find_staged(Path(), Path(name))
    return draft.path


def test_a_draft_that_was_left_is_swept_away():
    left, other = left_behind("out"), left_behind("other")
    assert (left / "rank_0000.onnx").exists()
    assert shard("--force") == 0
    assert sorted(os.listdir()) == sorted(["out", other.name])


def test_what_was_put_aside_is_put_back():
    """A process was killed between two renames, on a file system that cannot exchange names."""
    kept = content(Path("out"))
    Path("out").rename(staging_names.fresh_name(Path("out"), staging_names.OLD))
    assert main(["merge", "out", "-o", "m.onnx"]) == 3
    sweep(Path(), Path("out"))
    assert content(Path("out")) == kept


def test_it_is_said_where_a_folder_is_that_was_put_aside(capsys):
    aside = staging_names.fresh_name(Path("out"), staging_names.OLD)
    Path("out").rename(aside)
    assert main(["verify", "out"]) == 3
    assert f"mv {aside} out" in capsys.readouterr().err


def test_without_exchange(monkeypatch):
    monkeypatch.setattr(rename, "renameat2", lambda: None)
    assert shard("--force") == 0 and os.listdir() == ["out"]
    assert len(json.loads(Path("out/manifest.json").read_text())["ranks"]) == 3
    assert main(["merge", "out", "-o", "m.onnx"]) == 0 and main(["merge", "out", "-o", "m.onnx", "--force"]) == 0
    assert sorted(os.listdir()) == ["m.onnx", "out"]


FEW_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from gopt.artifact.output_folder import output_folder
from gopt.errors import RunError

most = len(os.listdir("/proc/self/fd")) + 4
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
try:
    with output_folder(Path("out"), force=False) as staged:
        (staged / "a").write_text("a")
        held = []
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
except RunError as error:
    print(error.message, *error.hints, sep="|")
"""


def test_where_descriptors_are_short_nothing_is_left_behind(tmp_path):
    """The draft was left, and the message said that nothing was."""
    folder = tmp_path / "apart"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout == "cannot write out: too many files are open (ulimit -n)|nothing was left behind\n"
    assert not [*folder.iterdir()]


def test_a_draft_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("gopt.system.staging.remove", lambda path: None)
    with pytest.raises(RunError) as caught, output_folder(tmp_path / "new/out", force=False):
        raise OSError(errno.EIO, "no answer")
    (left,) = (tmp_path / "new").iterdir()
    assert caught.value.hints == (f"remove {left}, or let the next run do so",)
