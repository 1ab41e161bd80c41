"""The help of every command: it fits in 80 columns, no summary is cut off, and misspelt options are mended."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from gopt.cli import elsewhere
from gopt.cli.help import topics
from gopt.cli.main import COMMANDS, Commands, group, main
from helpers import ROOT

from gopt.offline import environment
from gopt.offline.environment import Environment, Finding


def commands() -> list[tuple[str, ...]]:
    """Every command, and the commands of each group."""
    context = click.Context(group)
    inner = [
        (name, each)
        for name in COMMANDS
        if isinstance(found := group.get_command(context, name), click.Group) and not isinstance(found, Commands)
        for each in found.commands
    ]
    return [(), *((name,) for name in COMMANDS), *inner]


def help_of(words: tuple[str, ...]) -> list[str]:
    run = CliRunner().invoke(group, [*words, "--help"], terminal_width=80, prog_name="gopt")
    assert run.exit_code == 0, run.output
    return run.output.splitlines()


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_no_line_is_wider_than_80_columns(words: tuple[str, ...]) -> None:
    assert [line for line in help_of(words) if len(line) > 80] == []


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_an_example_of_its_own_and_prints_json(words: tuple[str, ...]) -> None:
    lines = help_of(words)
    example = lines[lines.index("  Example:") + 1].split()
    assert tuple(example)[: len(words) + 1] == ("gopt", *words) or words in ((), ("reproduce",))
    no_result = ((), ("help",), ("golden",))
    assert words in no_result or [line for line in lines if line.strip().startswith("--json")]


@pytest.mark.parametrize("command", ["shard", "reshard"])
def test_stages_are_listed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ("9", "-1", "two"):
        assert main([command, "no.onnx", "--ranks", "2", "-o", "out", "--stage", stage]) == 2
        assert f"Invalid value for '--stage': '{stage}' is not one of 0, 1, 2, 3." in capsys.readouterr().err


@pytest.mark.parametrize("words", [words for words in commands() if words in ((), ("golden",))], ids=" ".join)
def test_no_summary_is_cut_off(words: tuple[str, ...]) -> None:
    lines = help_of(words)
    listed = lines[lines.index("Commands:") + 1 :]
    assert listed and [line for line in listed if line.endswith("...")] == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["shard", "x", "--zero", "3"], "did you mean --stage N?"),
        (["shard", "x", "--world-size", "3"], "did you mean --ranks N?"),
        (["shard", "x", "--bucket_mb", "3"], "did you mean --bucket-mb?"),
        (["shard", "x", "--lr", "3"], "gopt run DIR --set lr=1e-3"),
        (["run", "x", "--lr", "3"], "did you mean --set lr=1e-3?"),
        (["run", "x", "--iterations", "3"], "did you mean --steps K?"),
        (["run", "x", "--num-epochs", "3"], "did you mean --epochs E?"),
        (["derive", "x", "--learning-rate", "3"], "did you mean --lr X?"),
        (["verify", "x", "--batch-size", "3"], "the batch has the size"),
    ],
)
def test_options_of_other_tools_and_commands_are_understood(words, meant, capsys):
    assert main(words) == 2
    assert meant in capsys.readouterr().err


def test_what_is_meant_is_an_option_of_some_command() -> None:
    context = click.Context(group)
    known = {option for name in COMMANDS for param in group.get_command(context, name).params for option in param.opts}
    assert {written.split()[0] for written in elsewhere.MEANT} <= known


@pytest.mark.parametrize("topic", topics())
def test_a_topic_is_a_short_page(topic, capsys):
    assert main(["help", topic]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and [line for line in lines if len(line) > 80] == []
    assert topic in " ".join(help_of(("help",))), "the help of help lists it"


def test_no_message_names_a_page_that_a_wheel_lacks() -> None:
    """Docstrings may: they stand beside the pages."""
    named = re.compile(r"docs/[a-z-]+\.md|gopt help ([a-z-]+)")
    known, found = {*COMMANDS, *topics()}, []
    for path in (*(ROOT / "gopt").rglob("*.py"), *(ROOT / "cli").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not named.search(text):
            continue
        tree = ast.parse(text)
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                found += [(path.name, each[0]) for each in named.finditer(node.value) if each[1] not in known]
    assert found == []


def test_an_unknown_topic_names_the_nearest(capsys):
    assert main(["help", "role"]) == 2
    assert "did you mean 'roles'?" in capsys.readouterr().err


def test_a_factory_is_written_whole_and_never_over_another_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0 and "gopt export factory.py:make -o step.onnx" in capsys.readouterr().out
    text = Path("factory.py").read_text()
    assert "gopt export factory.py:make -o step.onnx" in text and "{name}" not in text
    compile(text, "factory.py", "exec")
    Path("factory.py").write_text("mine")
    assert main(["init"]) == 2 and Path("factory.py").read_text() == "mine"
    assert main(["init", "--force", "--json"]) == 0 and Path("factory.py").read_text() == text
    assert main(["init", "factory.txt"]) == 2


def test_the_demo_is_a_step_that_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (ROOT / "cli/demo_files/step.onnx").read_bytes() == (ROOT / "fixtures/mlp_adamw.onnx").read_bytes()
    assert main(["demo"]) == 0
    first = {path.name: path.read_bytes() for path in (tmp_path / "gopt-demo").iterdir()}
    commands = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  gopt ")]
    assert [words[1] for words in commands] == ["shard", "verify", "run"]
    for words in commands:
        assert main([*words[1:], "-q"]) == 0, words
    assert main(["demo"]) == 2
    assert main(["demo", "--force", "--json"]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "gopt-demo").iterdir()} == first
    (tmp_path / "gopt-demo/mine.txt").write_text("kept")
    assert main(["demo", "--force"]) == 2 and (tmp_path / "gopt-demo/mine.txt").exists()


def test_the_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch, capsys):
    missing = Finding("torch", "", "gopt export", "pip install 'gopt[torch]'")
    monkeypatch.setattr(environment, "examine", lambda: Environment((missing, Finding("onnx", "1.19", "all"))))
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "missing" in said and "torch: pip install 'gopt[torch]'" in said
    broken = Finding("ONNX Runtime", "", "gopt run", "pip install onnxruntime-gpu", required=True)
    monkeypatch.setattr(environment, "examine", lambda: Environment((broken,)))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sound"] is False


@pytest.mark.parametrize(
    ("typed", "meant"), [("--rank", "--ranks"), ("--mash", "--mesh"), ("--only-rank", "--only-ranks")]
)
def test_the_nearest_option_is_named(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "no.onnx", typed, "2"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"gopt: error: there is no option {typed}",
        f"  hint: did you mean {meant}?",
        "  hint: see gopt shard --help",
    ]
