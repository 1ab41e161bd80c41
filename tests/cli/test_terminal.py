"""What leaves gopt: names are clean in every message and table, lines are short, libraries are quiet."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from pathlib import Path

import onnx
import pytest
from gopt.cli.main import main
from gopt.cli.terminal import print_error, quiet_libraries, safe_json
from helpers import FIXTURES, is_clean

from gopt.text.sanitize import line, show

EVIL = "w\x1b[31m\x9b2J\u202e\a[/red] [bold"
"""A name that colours, clears and turns a terminal, and that rich would take for its markup."""
LONG = "n" * 100_000


@pytest.fixture(scope="module")
def named(tmp_path_factory) -> Path:
    """A step with a parameter of an evil name, and one of an endless one."""
    model = onnx.load(FIXTURES / "mlp_sgd.onnx")
    stored = sorted(each.name for each in model.graph.initializer if each.name.endswith("weight"))
    other = dict(zip(stored, (EVIL, LONG[:4000])))
    for node in model.graph.node:
        node.input[:] = [other.get(name, name) for name in node.input]
    for each in (*model.graph.input, *model.graph.initializer):
        each.name = other.get(each.name, each.name)
    path = tmp_path_factory.mktemp("named") / "evil.onnx"
    onnx.save(model, path)
    return path


def test_names_are_clean_in_every_command(named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, plain = str(named), str(FIXTURES / "mlp_sgd.onnx")
    for arguments, code in (
        (["inspect", model], 0),
        (["inspect", "--text", model], 0),
        (["inspect", "--json", model], 0),
        (["plan", model, "--ranks", "2"], 0),
        (["shard", model, "--ranks", "2", "-o", "out", "--print-after", "shard"], 0),
        (["shard", model, "--ranks", "2", "--dry-run", "--json"], 0),
        (["inspect", "out"], 0),
        (["inspect", "--text", "out"], 0),
        (["verify", "out", "--steps", "1"], 0),
        (["diff", model, plain], 1),
        (["diff", "--json", model, plain], 1),
        (["merge", "out", "-o", "m.onnx"], 0),
        (["shard", model, "--ranks", "2", "--batch", EVIL, "--dry-run"], 2),
        (["shard", model, "--ranks", "2", "--batch", LONG, "--dry-run"], 2),
        (["shard", model, "--ranks", "2", "--states", f"{EVIL}=nix", "--dry-run"], 2),
        (["shard", f"{EVIL}.onnx", "--ranks", "2"], 3),
        (["shard", model, "--ranks", EVIL], 2),
        ([EVIL], 2),
    ):
        capsys.readouterr()
        assert main(arguments) == code, capsys.readouterr().err
        out, err = capsys.readouterr()
        assert is_clean(out) and is_clean(err), arguments
        assert all(len(each.encode()) < 1000 for each in err.splitlines() if each.startswith(("gopt: ", "  hint: ")))


def test_lines_of_errors_are_short(capsys):
    print_error("é" * 5000 + " the end", ["h" * 5000])
    lines = capsys.readouterr().err.splitlines()
    assert [len(each.encode()) < 1000 for each in lines] == [True, True]
    assert lines[0].startswith("gopt: error: éé") and lines[0].endswith("é the end") and "[…]" in lines[0]
    assert line("a\n b\tc") == "a b c"


def test_json_keeps_its_meaning():
    record = {EVIL: ["é", "\u2028", "\U000e0001", "\ud800"]}
    text = safe_json(json.dumps(record, ensure_ascii=False))
    assert is_clean(text) and json.loads(text) == record and "é" in text


def test_names_in_messages_end():
    assert (
        len(show(LONG)) <= 121 and show("a") == "'a'" and len(show(10**5000)) < 100 and len(show([LONG] * 10**5)) <= 121
    )


def test_libraries_are_quiet_and_the_users_own_warnings_are_a_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys, warnings\nsys.argv[1:] = ['passes']\n"
        "import gopt.cli.passes as passes\nimport gopt.cli.main as command\nimport json\n"
        "def noisy(*given, **more):\n"
        "    warnings.warn('mine\\x1b[31m')\n"
        "    warnings.warn_explicit('theirs', UserWarning, json.__file__, 1)\n"
        "command.group.main, kept = noisy, command.group.main\n"
        "command.main()\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "mine.py")], capture_output=True, text=True, check=True)
    assert done.stderr == "gopt: note: mine.py, line 7: UserWarning: mine\\x1b[31m\n"
    loud = subprocess.run([sys.executable, "-W", "always", str(tmp_path / "mine.py")], capture_output=True, text=True)
    assert "theirs" in loud.stderr


def test_warnings_are_as_they_were_afterwards(capsys):
    before = warnings.showwarning
    assert main(["passes"]) == 0
    assert warnings.showwarning is before


def test_what_garbage_leaves_is_no_note_of_the_command_in_which_it_is_collected(tmp_path, capsys):
    """pytest shows every warning: a file that an earlier test left open in a cycle was a note of a later one."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with quiet_libraries():
            cycle = [open(tmp_path / "left", "w", encoding="utf-8")]  # noqa: SIM115
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
            gc.collect()
            warnings.warn_explicit("made", UserWarning, "<string>", 1)
        assert capsys.readouterr().err == ""
