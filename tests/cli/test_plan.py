"""``gopt plan`` and ``gopt shard --auto`` as a user meets them."""

from __future__ import annotations

import contextlib
import functools
import io
import json

import pytest
from gopt.cli.main import main
from helpers import FIXTURES
from products import part

MODEL = str(FIXTURES / "gpt_adamw.onnx")


def test_the_table_is_a_line_a_choice(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["plan", MODEL, "--mesh", "shard=4", "--link", "200GB/s:5us", "--memory", "1GB"]) == 0
    text = capsys.readouterr().out
    assert "least time of those that fit" in text
    assert "best: stage " in text
    assert "gopt shard --mesh shard=4 --auto takes it" in " ".join(text.split())
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


def test_a_device_times_steps(capsys, tmp_path, monkeypatch):
    """A known one as its own file; a line has the parts of the step in eighty columns."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", MODEL, "--mesh", "shard=4", "--device", "a100", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["link"] == record["device"]["link"] and record["device"]["name"] == "a100"
    times = [row["step"]["seconds"] for row in record["choices"]]
    assert times[0] == pytest.approx(min(times), rel=0.01)
    (tmp_path / "mine.json").write_text(json.dumps(record["device"]))
    assert main(["plan", MODEL, "--mesh", "shard=4", "--device", str(tmp_path / "mine.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record
    assert main(["plan", MODEL, "--mesh", "shard=4", "--device", "a100"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.split()[:1] == ["stage"])
    assert head.split()[-3:] == ["compute", "exposed", "step"] and all(len(line) <= 80 for line in lines)
    assert all(any(line.startswith(f"{name}: ") for line in lines) for name in ("compute", "exposed", "step"))
    assert main(["plan", MODEL, "--trainers", "2", "--servers", "2", "--device", "a100"]) == 2
    assert main(["plan", MODEL, "--mesh", "shard=4", "--device", str(tmp_path / "none.json")]) == 3


def test_nothing_fits(capsys):
    assert main(["plan", MODEL, "--mesh", "shard=4", "--memory", "1KB"]) == 0
    assert "nothing fits in 1.0 KiB" in capsys.readouterr().out


@functools.cache
def planned(*options: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", MODEL, *options, "--bucket-mb", "0.005", "--json"]) == 0
    return out.getvalue()


@pytest.mark.parametrize(
    ("mesh", "stage", "link"),
    part([
        ("shard=4", 0, ""), ("shard=4", 1, ""), ("shard=4", 2, ""), ("shard=4", 3, ""), ("shard=2,tp=2", 0, ""),
        ("shard=2,tp=2", 2, "200GB/s:5us"), ("tp=4", 0, "200GB/s:5us"), ("shard=2,tp=2", 3, ""),
    ], 3),
)  # fmt: skip
def test_figures_of_the_plan_are_those_of_the_report(mesh, stage, link, capsys):
    """Of rows that were weighed beside those of other meshes."""
    links = ["--link", link] if link else []
    rows = json.loads(planned("--ranks", "4", *links))["choices"]
    given = [*(links if "tp" in mesh else []), "--bucket-mb", "0.005", "--stage", str(stage)]
    assert main(["shard", MODEL, "--mesh", mesh, *given, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    row = next(row for row in rows if (row["mesh"], row["stage"], row["partition"]) == (mesh, stage, "flat"))
    assert row["bucket_mb"] == 0.005
    assert row["traffic"] == {key: report["figures"]["traffic"][key] for key in row["traffic"]}
    assert row["calls"] == report["figures"]["calls"]
    assert row["hidden_share"] == report["figures"]["overlap"]["hidden_share"]
    for kind in ("parameters", "optimizer_states"):
        assert row["bytes"][kind] == max(rank["bytes"][kind] for rank in report["ranks"])


def test_ranks_alone_ask_for_meshes(capsys, monkeypatch):
    """In eighty columns: every stage of every mesh once, reasons and remarks under the table."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", MODEL, "--ranks", "4", "--bucket-mb", "0.005", "--link", "200GB/s:5us"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    head = next(place for place, line in enumerate(lines) if line.split()[:1] == ["mesh"])
    assert lines[head].split()[-1] == "time/batch"
    rows = [line.split() for line in lines[head + 1 :] if line.rstrip().endswith(" ms")]
    told = [(row[1], int(stage)) for row in rows for stage in row[2].split(",")]
    shared = ("shard=2,cp=2", "shard=2,sp=2", "shard=2,tp=2", "shard=4")
    assert sorted(told) == [*((mesh, stage) for mesh in shared for stage in range(4)), ("tp=4", 0)]
    assert len(rows) < len(told), "stages that cost the same are one row"
    assert "times the time of the first for each batch" in text
    assert "tp=4: a product over 2 heads of 8 stays whole" in text
    assert "best: shard=4, stage" in text and "gopt shard --mesh shard=4 --auto takes it" in " ".join(text.split())


def test_what_fits_may_need_ranks_that_compute_together(capsys):
    assert main(["plan", MODEL, "--ranks", "4", "--bucket-mb", "0.005", "--memory", "120KB", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ranks"] == 4 and "mesh" not in record
    fit = {row["mesh"] for row in record["choices"] if row["fits"]}
    assert record["choices"][0]["mesh"] == "shard=2,tp=2" and "shard=4" not in fit


def test_eighty_columns_hold_the_table(capsys, monkeypatch):
    """Reasons stand under it, a line each; no cell is broken."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", MODEL, "--mesh", "shard=4", "--link", "200GB/s:5us"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(place for place, line in enumerate(lines) if line.split()[:1] == ["stage"])
    assert lines[head].split()[-1] == "time" and all(len(line) <= 80 for line in lines)
    rows = [line for line in lines[head + 1 :] if line.rstrip().endswith(" ms")]
    assert len(rows) == 7 and all(line.split()[0] == str(number) for number, line in enumerate(rows, 1))
    assert "more columns: --wide" in lines
    assert main(["plan", MODEL, "--mesh", "shard=4", "--wide"]) == 0
    assert "parameters" in capsys.readouterr().out
