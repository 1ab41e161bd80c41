"""``gopt shard`` as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, ROOT, Builder, folder_bytes, perceptron, sgd

from gopt.artifact import report_builder
from gopt.errors import UnsupportedError

MODEL = str(FIXTURES / "mlp_adamw.onnx")
SCALED = str(FIXTURES / "mlp_adamw_fp16_scaler.onnx")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_folder(capsys):
    assert main(["shard", MODEL, "--ranks", "3"]) == 0
    out = Path("mlp_adamw.ranks")
    assert sorted(path.name for path in out.iterdir()) == [
        "manifest.json", "rank_0000.onnx", "rank_0001.onnx", "rank_0002.onnx", "report.json", "source.onnx",
        "states.bin",
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "mlp_adamw.onnx" in said.out and "mlp_adamw.ranks" in said.out
    assert said.err == ""
    assert [path.name for path in Path().iterdir()] == ["mlp_adamw.ranks"]


@pytest.mark.parametrize("name", ["manifest", "report"])
def test_records_follow_their_schemas(name):
    assert main(["shard", SCALED, "--ranks", "3", "-o", "out"]) == 0
    schema = json.loads((ROOT / f"gopt/schemas/{name}.schema.json").read_text())
    jsonschema.validate(json.loads(Path("out", f"{name}.json").read_text()), schema)


def test_no_path_and_no_time_in_the_files():
    assert main(["shard", MODEL, "--ranks", "2", "-o", "a"]) == 0
    time.sleep(0.01)
    Path("elsewhere").mkdir()
    assert main(["shard", MODEL, "--ranks", "2", "-o", "elsewhere/b"]) == 0
    assert folder_bytes(Path("a")) == folder_bytes(Path("elsewhere/b"))
    for data in folder_bytes(Path("a")).values():
        assert str(FIXTURES).encode() not in data


def test_dry_run_writes_nothing(capsys):
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run"]) == 0
    assert not list(Path().iterdir())
    assert "dry" in capsys.readouterr().out


def test_dry_run_looks_past_an_existing_folder():
    Path("mlp_adamw.ranks").mkdir()
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run"]) == 0
    assert not list(Path("mlp_adamw.ranks").iterdir())


def test_json_is_the_report(capsys):
    assert main(["shard", MODEL, "--ranks", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "gopt-report/2"
    assert report == json.loads(Path("mlp_adamw.ranks/report.json").read_text())


def test_force_replaces_the_folder_whole():
    assert main(["shard", MODEL, "--ranks", "3", "-o", "out"]) == 0
    Path("out", "left over").write_text("")
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out", "--force"]) == 2
    Path("out", "left over").unlink()
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out", "--force"]) == 0
    names = {path.name for path in Path("out").iterdir()}
    assert "rank_0002.onnx" not in names and "left over" not in names
    assert [path.name for path in Path().iterdir()] == ["out"]


@pytest.mark.parametrize(("text", "ranks"), [("0-1", [0, 1]), ("2", [2]), ("0,2", [0, 2])])
def test_only_some_ranks(text, ranks):
    assert main(["shard", MODEL, "--ranks", "3", "-o", "all"]) == 0
    assert main(["shard", MODEL, "--ranks", "3", "--only-ranks", text, "-o", "some"]) == 0
    whole, part = folder_bytes(Path("all")), folder_bytes(Path("some"))
    files = [f"rank_{rank:04d}.onnx" for rank in ranks]
    assert [name for name in part if name.startswith("rank_")] == files
    assert all(part[name] == whole[name] for name in (*files, "states.bin", "source.onnx"))
    assert [rank["rank"] for rank in json.loads(part["manifest.json"])["ranks"]] == ranks


def test_print_after_every_pass():
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run", "--print-after", "all", "--print-dir", "texts"]) == 0
    report = ["shard", MODEL, "--ranks", "2", "--dry-run", "--json"]
    assert main(report) == 0
    files = sorted(path.name for path in Path("texts").iterdir())
    passes = [name.split("_", 1)[1].removesuffix(".txt") for name in files]
    assert passes[-1] == "prune" and "shard" in passes
    assert [int(name.split("_")[0]) for name in files] == list(range(1, len(files) + 1))
    text = Path("texts", files[passes.index("shard")]).read_text()
    assert "ReduceScatter" in text and "AllGather" in text


def test_print_after_one_pass_goes_to_stderr(capsys):
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run", "--json", "--print-after", "shard"]) == 0
    said = capsys.readouterr()
    assert "ReduceScatter" in said.err
    json.loads(said.out)


def test_config():
    Path("gopt.toml").write_text(
        '[mesh]\nshard = 3\n[pipeline]\npasses = ["shard", "statistics", "prune"]\n[pass.shard]\nstage = 1\n'
        "bucket-mb = 0.5\n"
    )
    assert main(["shard", MODEL, "--config", "gopt.toml"]) == 0
    report = json.loads(Path("mlp_adamw.ranks/report.json").read_text())
    assert report["mesh"]["ranks"] == 3
    options = {each["name"]: each["options"] for each in report["pipeline"]}
    assert list(options) == ["shard", "statistics", "prune"]
    assert options["shard"]["stage"] == 1 and options["shard"]["bucket_mb"] == 0.5


def test_options_go_before_the_configuration(capsys):
    Path("gopt.toml").write_text("[mesh]\nshard = 3\n[pass.shard]\nstage = 1\n")
    arguments = ["shard", MODEL, "--config", "gopt.toml", "--ranks", "2", "--stage", "0", "--dry-run", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"]["ranks"] == 2
    assert {each["name"]: each["options"] for each in report["pipeline"]}["shard"]["stage"] == 0


def test_a_pipeline_as_text(capsys):
    text = "shard{stage=1, bucket-mb=0}, statistics, prune"
    assert main(["shard", MODEL, "--ranks", "2", "--pipeline", text, "--dry-run", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["pipeline"][0]
    assert first["name"] == "shard" and first["options"]["stage"] == 1
    assert len(first["facts"]["buckets"]) == 4


def test_verify_each_and_verbs_chain():
    assert main(["shard", MODEL, "--mesh", "shard=2", "--verify-each", "-o", "out"]) == 0
    assert main(["verify", "out", "--steps", "1", "--no-confirm", "--json"]) == 0
    assert main(["verify", MODEL, "out", "--steps", "1", "--no-confirm"]) == 0


def test_state_values_from_a_file():
    import numpy as np

    from gopt.ir.load import load

    model = FIXTURES / "mlp_rmsprop.onnx"
    graph = load(model)
    states = {name: np.ones(type.dims, type.dtype) for name, type in graph.inputs.items() if "." in name}
    np.savez("values.npz", **states)
    assert main(["shard", str(model), "--ranks", "2", "--state", "values.npz", "-o", "out"]) == 0
    assert Path("out/states.bin").stat().st_size >= sum(value.nbytes for value in states.values())
    assert main(["verify", "out", "--steps", "1", "--no-confirm"]) == 0


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_more_ranks_than_elements_has_a_note(stage, capsys):
    b = Builder()
    sgd(b, perceptron(b, (3, 2), bias=False))
    b.save(Path("m.onnx"))
    assert main(["shard", "m.onnx", "--ranks", "9", "--stage", stage, "--json", "-o", "out"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("ranks" in note for note in notes), notes
    assert main(["verify", "out", "--no-confirm"]) == 0


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_metric_and_what_it_follows(norm, stage, capsys):
    """Parameters that are gathered for the forward do not tie what it shows to the gradients."""
    b = Builder()
    net = perceptron(b, (3, 2))
    squares = [b.op("ReduceSum", b.op("Mul", grad, grad), keepdims=0) for grad in net.gradients.values()]
    b.output("shown", b.op("Sqrt", b.op("Sum", *squares)) if norm else b.op("Exp", net.loss), ())
    sgd(b, net)
    b.save(Path("m.onnx"))
    assert main(["shard", "m.onnx", "--ranks", "2", "--stage", stage, "--loss", "loss", "--json", "-o", "out"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    follows = "follows the reduced gradients" if norm else "is the rank's own"
    assert f"metric shown {follows}" in notes


def test_many_outputs_are_told_in_one_line_each(capsys):
    b = Builder()
    net = perceptron(b, (3, 2))
    for name in "abcdef":
        b.output(name, b.op("Expand", net.loss, b.const([2, 1], "int64")), (2, 1))
    sgd(b, net)
    b.save(Path("m.onnx"))
    assert main(["shard", "m.onnx", "--ranks", "2", "--loss", "loss", "--json", "-o", "out"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [each for each in notes if "metric" in each] == [
        "outputs a, b, c, d and 2 more replace no input and are taken as metrics",
        "metrics a, b, c, d and 2 more are the rank's own",
    ]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["passes", "--help"], ["shard", "--help"]])
def test_help_imports_little(arguments):
    """How long it takes is measured by benchmarks/start.py; what would make it slow is told here."""
    heavy = {"onnx", "numpy", "onnxruntime", "rich", "google.protobuf", "mpi4py", "llvmlite"}
    code = (
        "import sys\n"
        "from gopt.cli.main import main\n"
        f"assert main({arguments!r}) == 0\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_progress_is_not_drawn_into_a_pipe():
    command = [sys.executable, "-m", "gopt.cli", "shard", MODEL, "--ranks", "2", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and "\x1b" not in done.stdout


def rank_rows(text: str) -> list[str]:
    """The first column of the table of ranks."""
    lines = text.splitlines()
    begin = next(place for place, line in enumerate(lines) if line.startswith("rank  "))
    rows = [line.split()[0] for line in lines[begin + 1 :]]
    return rows[: next(place for place, word in enumerate(rows) if not word[0].isdigit())]


def test_ranks_of_which_the_same_is_told_are_one_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["shard", str(FIXTURES / "gpt_adamw.onnx"), "--ranks", "64", "-o", "out"]) == 0
    assert rank_rows(capsys.readouterr().out) == ["0-59", "60", "61-63"]
    assert main(["inspect", "out"]) == 0
    assert rank_rows(capsys.readouterr().out) == ["0-59", "60", "61-63"]
    assert main(["shard", MODEL, "--ranks", "2", "--stage", "0", "--dry-run"]) == 0
    assert rank_rows(capsys.readouterr().out) == ["0-1"]


def test_lines_are_wrapped_at_the_width_of_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run"]) == 0
    plain = capsys.readouterr().out
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run", "-v"]) == 0
    told = capsys.readouterr().out
    for what in (" checks of the sharding passed", "closed because"):
        assert what in told and what not in plain, what
    lines = [*plain.splitlines(), *told.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


def test_the_last_line_says_what_comes_next(capsys):
    assert main(["shard", MODEL, "--ranks", "3", "-o", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "written to out; gopt verify out compares it with its source"
    assert main(["shard", MODEL, "--ranks", "3", "-o", "some", "--only-ranks", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "written to some", "a part of the ranks proves nothing"


@pytest.mark.parametrize(
    "options", [["--ranks", "3"], ["--mesh", "dp=2,tp=2", "--annotate"], ["--ranks", "2", "--only-ranks", "1"]]
)
def test_processes_change_no_byte(capsys, monkeypatch, options):
    forks: list[int] = []
    fork = os.fork

    def counted() -> int:
        number = fork()
        forks.append(number)
        return number

    monkeypatch.setattr(os, "fork", counted)
    assert main(["shard", MODEL, *options, "-o", "out", "--jobs", "1"]) == 0
    alone, said = folder_bytes(Path("out")), capsys.readouterr()
    assert not forks
    assert main(["shard", MODEL, *options, "-o", "out", "--jobs", "4", "--force"]) == 0
    assert len(forks) == 2, "beside the passes, and beside the ranks"
    assert (folder_bytes(Path("out")), capsys.readouterr()) == (alone, said)


def _refuse(*_: object) -> None:
    raise UnsupportedError("no rule for x", "leave it out")


PARENT = os.getpid()


def _die(*_: object) -> None:
    assert os.getpid() != PARENT, "a child works on this"
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_in_a_child_is_the_same_line(capsys, monkeypatch):
    monkeypatch.setattr(report_builder, "find_removals", _refuse)
    said = []
    for jobs in ("1", "2"):
        assert main(["shard", MODEL, "--ranks", "2", "--jobs", jobs]) == 4
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] and said[0].startswith("gopt: error: no rule for x\n")
    assert list(Path().iterdir()) == []


def test_a_child_that_is_killed_ends_the_command(capsys, monkeypatch):
    monkeypatch.setattr(report_builder, "find_removed", _die)
    assert main(["shard", MODEL, "--ranks", "2", "--jobs", "4"]) == 5
    said = capsys.readouterr().err
    assert said.startswith("gopt: error: a process that computes beside this one was killed by SIGKILL\n")
    assert "--jobs 1" in said and list(Path().iterdir()) == []
