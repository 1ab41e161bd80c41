"""``gopt plan`` and ``gopt shard --auto`` as a user meets them."""

from __future__ import annotations

import json

import pytest
from gopt.cli.main import main
from helpers import FIXTURES

MODEL = str(FIXTURES / "gpt_adamw.onnx")


def test_the_table_is_a_line_a_choice(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["plan", MODEL, "--ranks", "4", "--link", "200GB/s:5us", "--memory", "1GB"]) == 0
    text = capsys.readouterr().out
    assert "least time of those that fit" in text
    assert "best: stage " in text
    assert "gopt shard --auto takes it" in text
    head = next(line for line in text.splitlines() if line.startswith("stage "))
    for column in ("live", "× minimum", "calls", "balance", "overlapped", "time"):
        assert column in head and f"{column}: " in text, "every column that needs it is explained"


def test_json_has_every_choice(capsys):
    assert main(["plan", MODEL, "--mesh", "dp=2,shard=4", "--link", "shard=200GB/s:5us,dp=25GB/s", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["mesh"] == "dp=2,shard=4"
    assert {(row["stage"], row["partition"]) for row in record["choices"]} == {
        (0, "flat"), *((stage, cut) for stage in (1, 2, 3) for cut in ("flat", "rows", "whole"))
    }  # fmt: skip
    for row in record["choices"]:
        assert row["bytes"]["total"] == sum(row["bytes"][k] for k in ("parameters", "optimizer_states", "live"))
        assert row["traffic"]["ratio"] <= 1.5
        assert row["why"]
        assert row["seconds"]["latency"] <= row["seconds"]["exposed"] <= row["seconds"]["total"]


def test_nothing_fits(capsys):
    assert main(["plan", MODEL, "--ranks", "4", "--memory", "1KB"]) == 0
    assert "nothing fits in 1.0 KiB" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_figures_of_the_plan_are_those_of_the_report(stage, capsys):
    assert main(["plan", MODEL, "--ranks", "4", "--bucket-mb", "0.005", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["choices"]
    assert main(["shard", MODEL, "--ranks", "4", "--bucket-mb", "0.005", "--stage", stage, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    row = next(row for row in rows if (row["stage"], row["partition"]) == (int(stage), "flat"))
    assert row["bucket_mb"] == 0.005
    assert row["traffic"] == {key: report["figures"]["traffic"][key] for key in row["traffic"]}
    assert row["calls"] == report["figures"]["calls"]
    assert row["hidden_share"] == report["figures"]["overlap"]["hidden_share"]
    for kind in ("parameters", "optimizer_states"):
        assert row["bytes"][kind] == max(rank["bytes"][kind] for rank in report["ranks"])


def test_eighty_columns_hold_the_table(capsys, monkeypatch):
    """Reasons stand under it, a line each; no cell is broken."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", MODEL, "--ranks", "4", "--link", "200GB/s:5us"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.split()[:1] == ["stage"])
    assert lines[head].split()[-1] == "time" and all(len(line) <= 80 for line in lines)
    rows = [line for line in lines[head + 1 :] if line.rstrip().endswith(" ms")]
    assert len(rows) == 10 and all(line.split()[0] == str(number) for number, line in enumerate(rows, 1))
