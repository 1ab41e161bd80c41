"""``gopt passes``: all of them, in order, with what each takes."""

from __future__ import annotations

import json

from gopt.cli.main import main

from gopt.passes import DEFAULT, PASSES
from gopt.passes.base import option_table


def heading(name: str) -> str:
    return name if name in DEFAULT else f"{name}  (not in the default pipeline)"


def test_json_has_every_pass(capsys):
    assert main(["passes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["passes"]
    assert [row["name"] for row in rows] == list(PASSES)
    assert [row["name"] for row in rows if row["default"]] == list(DEFAULT)
    for row in rows:
        spec = PASSES[row["name"]]
        assert [(each["name"], each["type"], each["default"]) for each in row["options"]] == option_table(spec)
        assert row["after"] == list(spec.after) and row["summary"] == spec.summary


def test_the_list_shows_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for spec in PASSES.values():
        place = lines.index(heading(spec.name))
        assert lines[place + 1] == f"  {spec.summary}"
        for name, kind, default in option_table(spec):
            shown = default or '""'
            assert f"  {name} = {shown}   ({kind})" in lines[place:], "types in brackets are not markup"


def test_every_line_is_indented_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["passes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert [line for line in lines if not line.startswith("  ")] == list(map(heading, PASSES))
