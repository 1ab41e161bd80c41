"""Tables: text stands as it is, and what goes into a pipe is not broken."""

from __future__ import annotations

import io

import pytest
from gopt.cli.render import SafeConsole, console, describe, few, print_ranks, table
from gopt.cli.render_progress import progress
from rich.text import Text


def printed(*objects: object, width: int = 80) -> str:
    out = SafeConsole(file=io.StringIO(), highlight=False, markup=False, width=width)
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


@pytest.mark.parametrize(("cap", "shown"), [(None, "default"), (0.5, "0.5 MiB"), (25.0, "25 MiB")])
def test_a_choice(cap, shown):
    assert describe(2, "rows", cap) == f"stage 2, rows, {shown} buckets"


def test_few_rows():
    assert list(few(range(20))) == list(range(12)) and list(few([1])) == [1]


def ranks(*groups: tuple[str, ...], shown: int = 9) -> list[str]:
    out = SafeConsole(file=io.StringIO(), highlight=False, markup=False, width=80)
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
