"""The help of every command: it fits in 80 columns, no summary is cut off, and misspelt options are mended."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner
from gopt.cli.main import COMMANDS, Commands, group, main


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
