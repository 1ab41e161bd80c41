"""Every command that click knows: outputs that take nothing, names that would forge lines, modes, links and devices."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import every
import onnx
import pytest
from gopt.cli.main import main
from recipes import build

BAD = "\nFORGED\x1b[31m\r\u202e"
FORGED = re.compile("^\\W*FORGED|\x1b\\[31m|\r|\u202e", re.MULTILINE)
"""What a name has done where it was printed as it is."""


def test_every_command_is_in_the_table():
    assert every.missing() == set()


@pytest.mark.rest
@pytest.mark.parametrize(
    "kind", ["some", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("all", "launched"))]
)
def test_output_that_goes_nowhere(kind):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("streams.py")), kind], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["broken"] == [] and found["shots"] >= found["commands"] > 2


@pytest.mark.rest
@pytest.mark.parametrize(
    ("kinds", "each"),
    [("names,things", 50), pytest.param("names,things,limits,links,variables", 10, marks=pytest.mark.slow)],
)
def test_hostile_surroundings(kinds, each):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("attacks.py")), kinds, str(each)], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == kinds.count(",") + 1, done.stderr
    assert [fault for each in found for fault in each["broken"]] == []


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    every.prepare(folder)
    return folder


WRITES = [name for name, text in every.TABLE.items() if " -o " in text and name not in ("export", "reduce")]
"""One output, named by -o."""


def output_of(name: str, path: str) -> list[str]:
    """The words of a command whose output is this one, without --force."""
    words = [word for word in every.TABLE[name].split() if word != "--force"]
    words[words.index("-o") + 1] = path
    return words


def test_outputs_have_the_mode_that_the_umask_leaves(home, monkeypatch):
    monkeypatch.chdir(home)
    made = []
    real = os.open

    def opened(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        number = real(path, flags, mode, **more)
        if flags & os.O_CREAT and ".gopt-" in str(path):
            made.append(stat.S_IMODE(os.fstat(number).st_mode))
        return number

    monkeypatch.setattr(os, "open", opened)
    for turn, name in enumerate(WRITES):
        mask = (0o077, 0o027, 0)[turn % 3]
        before = os.umask(mask)
        try:
            assert main(output_of(name, f"mode.{turn}")) == 0
        finally:
            os.umask(before)
        path = Path(f"mode.{turn}")
        for each in (path, *path.rglob("*")):
            wanted = (0o777 if each.is_dir() else 0o666) & ~mask
            assert stat.S_IMODE(each.stat().st_mode) == wanted, each
        assert set(made) <= {0o666 & ~mask}, "drafts as well"
        made.clear()


PLACES: dict[str, Callable[[Path], None]] = {
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "folder": lambda path: path.symlink_to("kept"),
    "file": lambda path: path.symlink_to("kept/file"),
    "itself": lambda path: path.symlink_to(path),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "force"])
def test_no_link_and_no_pipe_is_written_to(force, home, monkeypatch, capsys):
    """What is refused, stays, and so does what a link refers to."""
    monkeypatch.chdir(home)
    Path("kept").mkdir(exist_ok=True)
    Path("kept/file").write_text("mine")
    for turn, name in enumerate(each for each in WRITES if each != "derive"):
        place = Path(f"place.{turn}{len(force)}")
        PLACES[list(PLACES)[turn % len(PLACES)]](place)
        before = os.lstat(place)
        assert main([*output_of(name, str(place)), *force]) == 2, name
        assert capsys.readouterr().err.startswith(f"gopt: error: {place} ")
        assert os.path.samestat(os.lstat(place), before) and not Path("nowhere").exists()
    assert os.listdir("kept") == ["file"] and Path("kept/file").read_text() == "mine"


@pytest.mark.parametrize("given", ["pipe", "/dev/zero", "/dev/null"])
def test_no_pipe_and_no_device_is_read(given, home, monkeypatch, capsys):
    """Every command that reads a model or a folder: a pipe would be waited for, and a device has no end."""
    monkeypatch.chdir(home)
    if given == "pipe" and not Path("pipe").exists():
        os.mkfifo("pipe")
    for name in ("import", "derive", "shard", "split", "verify", "plan", "inspect", "explain", "report", "diff",
                 "merge", "load-state", "seal", "reshard", "reproduce", "run"):  # fmt: skip
        words = every.TABLE[name].split()
        words[1] = given
        assert main(words) in (2, 3), name
        assert capsys.readouterr().err.count("gopt: error: ") == 1


def odd(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, whose names would print lines of their own."""
    made = onnx.ModelProto.FromString(model.SerializeToString())
    graph = made.graph
    for part in (graph.initializer, graph.input, graph.output, graph.value_info, graph.node):
        for each in part:
            each.name += BAD if each.name else ""
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [name + BAD if name else name for name in names]
    return made


def test_a_name_forges_no_line(tmp_path, monkeypatch, capsys):
    every.prepare(tmp_path, odd(build(every.STEP)))
    monkeypatch.chdir(tmp_path)
    for name in ("other.onnx", "forward.onnx"):
        onnx.save(odd(onnx.load(name)), name)
    commands = [*map(str.split, every.TABLE.values()), *map(str.split, every.MORE.values())]
    commands += [["explain", folder, name + BAD] for folder in ("in.ranks", "in.split") for name in ("w0", "loss", "n")]
    commands += [["diff", "in.ranks", "in.split"], ["diff", "step.onnx", "other.onnx", "--full"]]
    commands += [["shard", "step.onnx", "--ranks", "2", "--dry-run", "--explain", "w0" + BAD]]
    for words in commands:
        main([word if word != "lr=0.01" else f"lr{BAD}=0.01" for word in words])
        said = capsys.readouterr()
        assert "FORGED" not in said.out + said.err or not FORGED.search(said.out + said.err), words
