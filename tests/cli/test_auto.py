"""``gopt shard --auto``: the first choice of ``gopt plan``."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, ROOT
from products import part

from gopt.verification.verify import Verifier

MODEL = str(FIXTURES / "gpt_adamw.onnx")


@pytest.mark.parametrize(
    "options",
    part(
        [["--device", "cpu"], [], ["--link", "200GB/s:5us"], ["--memory", "200KB", "--statistics", "local"]], 1, first=1
    ),
)
def test_auto_takes_the_first_and_says_why(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    plan = [each for each in options if each not in ("--statistics", "local")]
    assert main(["plan", MODEL, "--mesh", "shard=4", *plan, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["choices"][0]
    assert main(["shard", MODEL, "--ranks", "4", "--auto", *options, "-o", "out"]) == 0
    assert f"chosen of 10: stage {first['stage']}, {first['partition']}" in capsys.readouterr().out
    report = json.loads(Path("out/report.json").read_text())
    jsonschema.validate(report, json.loads((ROOT / "gopt/schemas/report.schema.json").read_text()))
    assert (first.pop("mesh"), first.pop("batches")) == ("shard=4", 4)
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
    assert capsys.readouterr().err.startswith(f"gopt: error: --auto chooses {options[0]} itself\n")


@pytest.mark.parametrize("options", [["--memory", "1GB"], ["--link", "1GB/s"], ["--device", "cpu"]])
def test_what_auto_takes_does_nothing_without_it(options, capsys):
    assert main(["shard", MODEL, "--ranks", "4", *options]) == 2
    assert "has no effect without --auto" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--auto", "--memory", "1KB"],
        ["--auto", "--memory", "much"],
        ["--auto", "--link", "fast"],
        ["--auto", "--device", "fast"],
    ],
)
def test_auto_refuses(options, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--ranks", "4", *options]) == 2
    assert capsys.readouterr().err.count("gopt: error:") == 1
    assert not list(Path().iterdir())


def test_auto_splits_by_the_links_of_the_device(tmp_path, monkeypatch, capsys):
    """As the plan did, so that the figures of the choice are those of the ranks."""
    monkeypatch.chdir(tmp_path)
    assert main(["plan", MODEL, "--mesh", "shard=2,tp=2", "--device", "a100", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["choices"][0]
    assert main(["shard", MODEL, "--mesh", "shard=2,tp=2", "--auto", "--device", "a100", "-o", "out"]) == 0
    report = json.loads(Path("out/report.json").read_text())
    assert report["choice"]["device"] == "a100" and report["choice"]["step"] == first["step"]
    assert report["pipeline"][0]["options"]["link"] == report["choice"]["link"] == "8x300GB/s:5us,25GB/s:10us"
    assert report["figures"]["traffic"]["sent"] == first["traffic"]["sent"]


@pytest.mark.rest
def test_auto_on_stages_takes_the_schedule_too(tmp_path, monkeypatch, capsys):
    """The first row as it stands: micro-batches, schedule, and the bytes that the report has."""
    monkeypatch.chdir(tmp_path)
    mesh, device = ["--mesh", "pp=2,shard=2"], ["--device", "cpu"]
    assert main(["plan", MODEL, *mesh, *device, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["choices"][0]
    assert main(["shard", MODEL, *mesh, "--auto", *device, "-o", "out"]) == 0
    assert f"{first['schedule']}, {first['accumulate']} micro-batches" in capsys.readouterr().out
    report = json.loads(Path("out/report.json").read_text())
    jsonschema.validate(report, json.loads((ROOT / "gopt/schemas/report.schema.json").read_text()))
    assert (first.pop("mesh"), first.pop("batches")) == ("pp=2,shard=2", 2 * first["accumulate"])
    assert {key: report["choice"][key] for key in first} == first
    assert Path("out/schedule.txt").read_text().splitlines()[1] == f"name {first['schedule']}"
    assert first["traffic"] == {key: report["figures"]["traffic"][key] for key in first["traffic"]}
    assert first["bytes"]["live"] == report["before_after"]["largest"]["peak_live"]
    assert Verifier("out").run(confirm=False).equal


@pytest.mark.parametrize("mesh", ["shard=2,ep=2", "pp=2,ep=2"])
def test_auto_on_experts_says_why(mesh, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = str(ROOT / "fixtures/families/moe_adamw.onnx")
    assert main(["plan", model, "--mesh", mesh, "--device", "cpu", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["choices"][0]
    assert main(["shard", model, "--mesh", mesh, "--auto", "--device", "cpu", "-o", "out"]) == 0
    capsys.readouterr()
    assert main(["explain", "out"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"mesh {mesh}, 4 ranks" in text and f"stage {first['stage']}, {first['partition']}" in text
    assert first["why"] in text and "choices on cpu: " in text


@pytest.mark.parametrize("stage", ["1", "3"])
def test_live_bytes_of_a_timed_row_are_those_of_the_ranks(stage, capsys):
    assert main(["plan", MODEL, "--mesh", "shard=2", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["choices"]
    row = next(row for row in rows if row["stage"] == int(stage) and row["bucket_mb"] is None)
    assert main(["shard", MODEL, "--mesh", "shard=2", "--stage", stage, "--dry-run", "--json"]) == 0
    assert row["bytes"]["live"] == json.loads(capsys.readouterr().out)["before_after"]["largest"]["peak_live"]


def test_a_link_settles_what_tensor_parallelism_sends(tmp_path, monkeypatch, capsys):
    """Without --auto too; a folder that is resharded leaves links of other axes out."""
    monkeypatch.chdir(tmp_path)
    assert main(["shard", MODEL, "--mesh", "dp=2,tp=2", "--link", "dp=1GB/s,tp=1000GB/s:1ms", "-o", "out"]) == 0
    first = json.loads(Path("out/report.json").read_text())["pipeline"][0]
    assert first["options"]["link"] == "dp=1GB/s,tp=1000GB/s:1ms"
    assert first["facts"]["mappings"]["gather from region"] > 0
    assert main(["reshard", "out", "--mesh", "shard=2,tp=2", "-o", "again"]) == 0
    assert "link=dp=1GB/s,tp=1000GB/s:1ms is dropped" in capsys.readouterr().err
    assert json.loads(Path("again/report.json").read_text())["pipeline"][0]["options"]["link"] == ""
    assert main(["shard", MODEL, "--mesh", "dp=2,tp=2", "--link", "tp=1GB/s", "--dry-run"]) == 2
    assert main(["shard", MODEL, "--mesh", "rep=2", "--axis", "rep=replica", "--link", "1GB/s", "--dry-run"]) == 2
    assert "no axis of the mesh rep=2 splits the computation" in capsys.readouterr().err


@pytest.mark.rest
def test_auto_divides_tokens_where_that_fits_unless_the_user_says_otherwise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mesh, own = ["--mesh", "shard=2,tp=2"], "tensor-parallel.sequence"
    assert main(["plan", MODEL, *mesh, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["choices"]
    least = min(row["bytes"]["total"] for row in rows if "sequence" not in row)
    auto = ["shard", MODEL, *mesh, "--auto", "--memory", f"{least - 1}B"]
    assert main([*auto, "-o", "out"]) == 0
    assert "sequence parallelism" in capsys.readouterr().out
    report = json.loads(Path("out/report.json").read_text())
    jsonschema.validate(report, json.loads((ROOT / "gopt/schemas/report.schema.json").read_text()))
    assert report["choice"]["sequence"] is True
    assert next(each for each in report["pipeline"] if each["name"] == "tensor-parallel")["options"]["sequence"] is True
    assert Verifier("out").run(confirm=False).equal
    assert main([*auto, "-O", f"{own}=true", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["choice"]["sequence"] is True
    assert main([*auto, "-O", f"{own}=false", "--dry-run"]) == 2
    assert "nothing fits" in capsys.readouterr().err
