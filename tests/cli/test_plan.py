"""``gopt plan`` and ``gopt shard --auto`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, ROOT

from gopt.verification.verify import Verifier

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


@pytest.mark.parametrize("options", [[], ["--link", "200GB/s:5us"], ["--memory", "200KB", "--statistics", "local"]])
def test_auto_takes_the_first_and_says_why(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = [each for each in options if each not in ("--statistics", "local")]
    assert main(["plan", MODEL, "--ranks", "4", *plan, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["choices"][0]
    assert main(["shard", MODEL, "--ranks", "4", "--auto", *options, "-o", "out"]) == 0
    assert f"chosen of 10: stage {first['stage']}, {first['partition']}" in capsys.readouterr().out
    report = json.loads(Path("out/report.json").read_text())
    jsonschema.validate(report, json.loads((ROOT / "gopt/schemas/report.schema.json").read_text()))
    assert {key: report["choice"][key] for key in first} == first
    assert report["choice"]["weighed"] == 10
    shard = next(each for each in report["pipeline"] if each["name"] == "shard")
    assert (shard["options"]["stage"], shard["options"]["partition"]) == (first["stage"], first["partition"])
    assert Verifier("out").run(confirm=False).equal


@pytest.mark.parametrize(
    "options",
    [["--stage", "1"], ["--partition", "rows"], ["--bucket-mb", "1"], ["--pipeline", "shard,prune"], ["--config", "x"]],
)
def test_auto_and_its_contraries(options, capsys):
    assert main(["shard", MODEL, "--ranks", "4", "--auto", *options]) == 2
    assert capsys.readouterr().err.startswith(f"gopt: error: --auto chooses what {options[0]} says\n")


@pytest.mark.parametrize("options", [["--memory", "1GB"], ["--link", "1GB/s"]])
def test_what_auto_takes_does_nothing_without_it(options, capsys):
    assert main(["shard", MODEL, "--ranks", "4", *options]) == 2
    assert "does nothing without --auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [["--auto", "--memory", "1KB"], ["--auto", "--memory", "much"], ["--auto", "--link", "fast"]]
)
def test_auto_refuses(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--ranks", "4", *options]) == 2
    assert capsys.readouterr().err.count("gopt: error:") == 1
    assert not list(Path().iterdir())


def test_eighty_columns_hold_the_table(capsys, monkeypatch):
    """Reasons stand under it, a line each; no cell is broken."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", MODEL, "--ranks", "4", "--link", "200GB/s:5us"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.split()[:1] == ["stage"])
    assert lines[head].split()[-1] == "time" and all(len(line) <= 80 for line in lines)
    rows = [line for line in lines[head + 1 :] if line.rstrip().endswith(" ms")]
    assert len(rows) == 10 and all(line.split()[0] == str(number) for number, line in enumerate(rows, 1))
