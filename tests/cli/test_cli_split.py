"""``gopt split`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from gopt.cli.main import main
from helpers import FIXTURES, folder_bytes

from gopt.artifact.manifest_check import read_manifest

STEP = str(FIXTURES / "mlp_adamw.onnx")
TWO = ("--trainers", "2", "--servers", "3")


def run(*command: str) -> int:
    return main(list(command))


def test_the_report_reads_well_at_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert run("split", STEP, *TWO, "--minimum", "16", "--slicing", "off") == 0
    said = capsys.readouterr()
    assert "checks of pieces, messages and graphs passed; written to mlp_adamw.split" in said.out
    assert "each trainer pushes 10.8 KiB" in said.out
    assert "server  pieces  parameters" in said.out and "balance: 2.224" in said.out
    assert max(len(line) for line in said.out.splitlines() if not line.startswith("note:")) <= 90
    assert "--minimum 16" in said.err and "8192" in said.err
    assert Path("mlp_adamw.split/trainer.onnx").is_file()
    assert run("split", STEP, *TWO) == 2
    assert run("split", STEP, *TWO, "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["pipeline"][0]["options"]["servers"] == 3


def test_servers_without_anything_are_named(tmp_path, capsys):
    assert run("split", STEP, "--trainers", "1", "--servers", "7", "-o", str(tmp_path / "out"), "--dry-run") == 0
    said = capsys.readouterr().out
    assert "idle: 4-6" in said and "nothing written" in said and not (tmp_path / "out").exists()


def test_options_of_tables_reach_the_manifest(tmp_path, capsys):
    step = str(FIXTURES / "sparse/dlrm_adam.onnx")
    given = (
        "--table", "table*=modulo", "--rows", "lazy", "--rows", "table1=dense",
        "--init", "table0=normal(0,0.02)@seed=7",
    )  # fmt: skip
    assert run("split", step, *TWO, *given, "-o", str(tmp_path / "out")) == 0
    assert "note: table 'table0': 64 rows of 8 lie on servers" in capsys.readouterr().out
    tables = read_manifest(tmp_path / "out")[0].parameter_server.tables
    assert [(table.parameter, table.update) for table in tables] == [
        ("table0", "lazy"), ("table1", "dense"), ("table2", "lazy")
    ]  # fmt: skip
    assert [(each.tensor, each.rows) for each in tables[0].init] == [("table0", "normal(0.0,0.02)@seed=7")]
    for wrong in (
        ("--rows", "lazy", "--rows", "dense"), ("--rows", "*=lazy", "--rows", "dense"), ("--init", "table0"),
        ("--rows", "table0=some"),
    ):  # fmt: skip
        assert run("split", step, *TWO, *wrong, "-o", str(tmp_path / "out"), "--dry-run") == 2


def test_every_option_reaches_the_manifest(tmp_path):
    (tmp_path / "map.toml").write_text('"fc1.weight" = 1\n"fc2.*" = 0\n')
    given = (
        "--mode", "async", "--delay-compensation", "0.5", "--count", "push", "--pull", "end", "--slicing", "classic",
        "--minimum", "9000", "--placement", "round-robin", "--server-map", str(tmp_path / "map.toml"), "--wire",
        "float16", "--fixed-trainers", "--bucket-mb", "0.5", "--roles", "server:0,1,2;trainer:3,4",
    )  # fmt: skip
    assert run("split", STEP, *TWO, *given, "-o", str(tmp_path / "out")) == 0
    plan = read_manifest(tmp_path / "out")[0].parameter_server
    assert plan is not None and plan.roles is not None
    assert (plan.mode, plan.compensation, plan.count, plan.pull) == ("async", 0.5, "push", "end")
    assert (plan.slicing, plan.minimum, plan.placement, plan.fixed_trainers) == ("classic", 9000, "round-robin", True)
    assert plan.roles.server_ranks == (0, 1, 2) and {key.wire for key in plan.keys} == {"float16"}
    owners = {key.name: key.server for key in plan.keys}
    assert owners["fc1.weight"] == 1 and owners["fc2.weight"] == owners["fc2.bias"] == 0


def test_micro_steps_may_stand_in_the_configuration(tmp_path):
    (tmp_path / "gopt.toml").write_text("accumulate = 2\n")
    assert run("split", STEP, *TWO, "--config", str(tmp_path / "gopt.toml"), "-o", str(tmp_path / "out")) == 0
    assert read_manifest(tmp_path / "out")[0].accumulate == 2
    assert (tmp_path / "out/trainer.micro.onnx").is_file()


def test_allreduce_is_what_shard_writes_at_stage_0(tmp_path):
    given = ("--bucket-mb", "0.01", "--accumulate", "2", "--loss-reduction", "sum")
    assert run("split", STEP, "--trainers", "3", "--mode", "allreduce", *given, "-o", str(tmp_path / "a")) == 0
    assert run("shard", STEP, "--mesh", "dp=3", "--stage", "0", *given, "-o", str(tmp_path / "b")) == 0
    assert folder_bytes(tmp_path / "a") == folder_bytes(tmp_path / "b")


def test_a_server_map_that_is_missing_ends_with_3(capsys, tmp_path):
    assert run("split", STEP, *TWO, "--server-map", "nowhere.toml", "-o", str(tmp_path / "out")) == 3
    assert "no server map" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--trainers", "0", "--servers", "1"), "--trainers cannot be 0"),
        (("--trainers", "1", "--servers", "0"), "--servers cannot be 0"),
        (("--trainers", "1"), "the number of servers is missing"),
        (("--servers", "1"), "the number of trainers is missing"),
        ((*TWO, "--minimum", "0"), "--minimum cannot be 0"),
        ((*TWO, "--bucket-mb", "nan"), "--bucket-mb cannot be nan"),
        ((*TWO, "--delay-compensation", "1"), "--mode async"),
        ((*TWO, "--roles", "trainer:0,0;server:1,2,3"), "rank 0"),
        ((*TWO, "--roles", "trainer:0;server:1,2,3"), "the roles name 1 trainer"),
        ((*TWO, "--loss-reduction", "median"), "--loss-reduction cannot be"),
        (("--trainers", "2", "--mode", "allreduce", "--servers", "2"), "--servers has no effect with --mode allreduce"),
        (("--trainers", "2", "--mode", "allreduce", "--wire", "float16"), "--wire has no effect"),
        (("--trainers", "2", "--mode", "allreduce", "--every", "0"), "--every has no effect"),
        ((*TWO, "--table", "fc1.weight"), "names no layout"),
        ((*TWO, "--mesh", "tp=2"), "--mesh tp=2: a trainer is one rank"),
        (("--trainers", "0", "--mode", "allreduce"), "--trainers cannot be 0"),
        (("--mode", "allreduce"), "the number of trainers is missing"),
    ],
)
def test_what_cannot_be_split_so_ends_with_2(given, message, capsys, tmp_path):
    assert run("split", STEP, *given, "-o", str(tmp_path / "out")) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        ("map.toml", "fc1.weight = 0\n", 3, "quote keys that have dots"),
        ("map.json", '{"fc1.weight": -1}', 3, "fc1.weight"),
        ("map.txt", "", 2, "neither TOML nor JSON"),
        ("map.toml", '"fc9.weight" = 0\n', 2, "fc9.weight"),
        ("map.toml", '"fc1.weight" = 3\n', 2, "3"),
    ],
)
def test_a_server_map_that_says_nothing_is_refused(name, text, code, message, capsys, tmp_path):
    (tmp_path / name).write_text(text)
    assert run("split", STEP, *TWO, "--server-map", str(tmp_path / name), "--dry-run") == code
    assert message in capsys.readouterr().err


def test_a_full_disk_is_told_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    assert run("split", STEP, *TWO, "-o", str(tmp_path / "out")) == 5
    assert "trainers and servers take at least" in capsys.readouterr().err
    assert run("split", STEP, *TWO, "--dry-run") == 0
