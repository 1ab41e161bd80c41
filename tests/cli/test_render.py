"""Tables: text stands as it is, and what goes into a pipe is not broken."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from gopt.cli.main import main
from gopt.cli.render import SafeConsole, console, few, print_ranks, table
from gopt.cli.render_progress import progress
from helpers import FIXTURES, NAMES, source
from rich.text import Text

import gopt
from gopt.artifact.server_entries import Mode
from gopt.offline.plan_settings import ShardSettings
from gopt.parameter_server.options import SplitOptions


def printed(*objects: object, width: int = 80) -> str:
    out = SafeConsole(file=io.StringIO(), width=width)
    for each in objects:
        out.print(each)
    text: str = out.file.getvalue()
    return text


def test_names_are_no_markup_and_no_commands():
    evil = "[red]w[/]\x1b[31m"
    for each in (evil, Text(evil), table(evil, ["name"], [[evil], [Text(evil)]])):
        text = printed(each)
        assert "[red]w[/]\\x1b[31m" in text and "\x1b" not in text


def test_numbers_stand_to_the_right_and_titles_on_one_line():
    lines = printed(table("a title that is wider", ["n", "m"], [[1, "x"], [100, "y"]], right=[0]), width=40)
    assert [line.rstrip() for line in lines.splitlines()] == ["a title that is wider", "  n  m", "  1  x", "100  y"]


def test_a_pipe_is_wide(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == 200
    monkeypatch.setenv("COLUMNS", "70")
    assert console().width == 70


def test_progress_says_nothing_into_a_pipe(capsys):
    with progress() as advance:
        advance("working")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("cap", "shown"), [(None, "default buckets"), (0.5, "buckets of 0.5 MiB"), (25.0, "buckets of 25 MiB")]
)
def test_a_choice(cap, shown):
    assert str(ShardSettings(2, "rows", cap)) == f"stage 2, rows, {shown}"


def test_few_rows():
    assert list(few(range(20))) == list(range(12)) and list(few([1])) == [1]


def ranks(*groups: tuple[str, ...], shown: int = 9) -> list[str]:
    out = SafeConsole(file=io.StringIO(), width=80)
    print_ranks(out, ("rank", "parameters", "calls", "sent"), groups, shown)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def test_calls_of_all_ranks_are_one_line():
    calls = "1 AllGather shard, 1 AllReduce dp"
    assert ranks(("0,2", "5 KiB", calls, "1 B"), ("1,3", "6 KiB", calls, "2 B")) == [
        "Ranks", "rank  parameters  sent", "0,2        5 KiB   1 B", "1,3        6 KiB   2 B",
        f"calls of each rank in a step: {calls}",
    ]  # fmt: skip


def test_calls_that_differ_are_a_column_also_where_few_rows_are_shown():
    groups = (("0", "5 KiB", "1 AllGather shard, 1 AllReduce dp", "1 B"), ("1", "5 KiB", "none", "0 B"))
    assert ranks(*groups, shown=1) == [
        "Ranks", "rank  parameters  calls              sent", "0          5 KiB  1 AllGather shard   1 B",
        "                  1 AllReduce dp",
    ]  # fmt: skip


def test_a_line_goes_on_between_two_words_and_below_the_text():
    line = "  reads " + "x" * 90 + " and y, " + "which is more than this terminal has room for in one line"
    rows = printed(line).splitlines()
    assert rows == [
        "  reads",
        "    " + "x" * 90,
        "    and y, which is more than this terminal has room for in one line",
    ]
    assert printed("a  b", "c\nd") == "a  b\nc\\nd\n", "what fits is as it was, and a name has no lines"
    out = SafeConsole(file=io.StringIO(), width=20, fits=False)
    out.print(Text(line))
    assert out.file.getvalue() == f"{line}\n", "in a pipe a text stays a line"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands below read."""
    home = tmp_path_factory.mktemp("results")
    drawn = np.random.default_rng(0)
    x = drawn.standard_normal((16, 32), dtype=np.float32)
    np.savez(home / "data.npz", x=x, y=(x @ drawn.standard_normal((32, 10))).argmax(1))
    mlp = source("mlp_adamw")
    gopt.shard(mlp, 2).write(home / "two")
    gopt.shard(source("gpt_adamw_clip_sched_fp16"), "dp=2,tp=2").write(home / "four")
    gopt.split(mlp, SplitOptions(trainers=2, servers=2, mode=Mode.ASYNC)).write(home / "split")
    given = {"data": home / "data.npz", "steps": 2, "settings": {"lr": 1e-3}}
    gopt.run(home / "two", **given, checkpoint=home / "kept")
    gopt.run(home / "split", **given, record=home / "run.json")
    return home


COMMANDS = (
    f"shard {FIXTURES}/gpt_adamw_clip_sched_fp16.onnx --ranks 4 --dry-run", "inspect two", "inspect four",
    f"shard {FIXTURES}/mlp_adamw.onnx --ranks 4 --loss-reduction auto --dry-run", "inspect split",
    f"split {FIXTURES}/mlp_adamw.onnx --trainers 2 --servers 2 --dry-run", "inspect two/manifest.json",
    f"plan {FIXTURES}/mlp_adamw.onnx --ranks 4", "inspect two/report.json", "inspect two/rank_0000.onnx",
    f"plan {FIXTURES}/mlp_adamw.onnx --mesh shard=4", "inspect split/server_0000.onnx", "inspect kept",
    f"diff {FIXTURES}/mlp_adamw.onnx {FIXTURES}/cnn_mom_fp16.onnx", "diff two four", "inspect data.npz",
    "inspect run.json", "explain two fc1.weight", "explain two b0", "explain four wte.weight",
    "explain split fc1.weight", "verify two --steps 1",
    "verify split --replay run.json", "passes", "merge kept/step_00000002 -o whole.onnx",
    *(f"inspect {FIXTURES}/{name}.onnx" for name in NAMES),
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_wider_than_the_terminal(command, results, monkeypatch, capsys):
    """A word, such as a path, stays whole."""
    monkeypatch.chdir(results)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(command.split()) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines and [line for line in lines if len(line) > 80 and " " in line.strip()] == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("inspect run.json", "the record of a run: 2 trainers and 2 servers, 2 steps, data "),
        ("inspect kept", "gopt run DIR --data FILE --steps N --checkpoint kept --resume continues"),
        (f"shard {FIXTURES}/mlp_adamw.onnx --ranks 4 --loss-reduction auto --dry-run", "auto: weighted:sum_1"),
        (f"shard {FIXTURES}/mlp_adamw.onnx --ranks 4 --dry-run -v", "checks of the sharding passed: reads "),
        ("explain two fc1.weight", "in call gopt.shard.b0.scattered, which sends 4 values"),
    ],
)
def test_what_a_newcomer_asked_for_is_said(command, said, results, monkeypatch, capsys):
    monkeypatch.chdir(results)
    assert main(command.split()) == 0
    assert said in capsys.readouterr().out


def test_a_report_counts_operators_as_the_folder_does(results, capsys):
    counts = []
    for path in (results / "two", results / "two" / "report.json"):
        assert main(["inspect", str(path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        counts.append((found["removed_ops"], found["added_ops"]))
    assert counts[0] == counts[1] and counts[0][0] > 50


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run gone --data data.npz --steps 1 --record r.json", "gone is not an output folder: there is no such folder"),
        ("run split --data data.npz --steps 1 --set lr=1e-3 --record run.json", "run.json exists already"),
        (f"shard {FIXTURES}/cnn_sgd.onnx --ranks 2 --statistics foo", "sum, max, min, gather, root or local"),
    ],
)
def test_refusals_name_the_cause(command, said, results, monkeypatch, capsys):
    monkeypatch.chdir(results)
    assert main(command.split()) in (2, 3)
    assert said in capsys.readouterr().err
