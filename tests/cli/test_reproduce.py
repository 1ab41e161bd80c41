"""``--reproducer``, ``gopt reproduce`` and ``gopt reduce``, with planted defects."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import onnx
import pytest
from gopt.cli import command_line
from gopt.cli.main import COMMANDS, group, main
from helpers import FIXTURES, Builder, perceptron, sgd
from products import part

from gopt.artifact import ranks
from gopt.artifact.integrity import FileEntry
from gopt.errors import InputError
from gopt.offline.reproducer.record import Argument
from gopt.steps import sharded

MODEL = str(FIXTURES / "mlp_sgd.onnx")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOPT_TEST_SECRET", "environment-secret")
    return tmp_path


@pytest.fixture
def crash(monkeypatch):
    """Lowering ends with a KeyError where there is a LogSoftmax: a defect."""
    lower = sharded.lower

    def crashing(program, wanted, *rest):
        found = [node for node in program.graph.nodes if node.op_type == "LogSoftmax"]
        if found:
            raise KeyError(found[0].outputs[0])
        return lower(program, wanted, *rest)

    monkeypatch.setattr(sharded, "lower", crashing)
    return lambda: monkeypatch.setattr(sharded, "lower", lower)


def record(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("reproducer.json"))


def test_a_crash_is_recorded_reproduced_and_after_a_repair_not(here, crash, capsys):
    words = ["shard", MODEL, "--ranks", "2", "-o", "out", "--reproducer", "r.zip"]
    assert main(words) == 70
    assert "gopt: note: the reproducer is r.zip" in capsys.readouterr().err
    failure = record(here / "r.zip")["failure"]
    assert (failure["exit_code"], failure["kind"], failure["where"]) == (70, "KeyError", "gopt.steps.sharded:shard")
    assert main(["reproduce", "r.zip"]) == 0
    assert "fails in the same way: exit code 70, KeyError in gopt.steps.sharded:shard" in capsys.readouterr().out
    crash()
    assert main(["reproduce", "r.zip", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "gopt-reproduction/1"
    assert (said["same"], said["found"]) == (False, None)
    assert sorted(path.name for path in here.iterdir()) == ["r.zip"], "nothing else is written"


def test_nothing_but_model_and_configuration_is_in_it(here, crash):
    (here / "secret").mkdir()
    shutil.copy(MODEL, here / "secret/step.onnx")
    (here / "gopt.toml").write_text("accumulate = 1\n")
    (here / "state.npz").write_bytes(b"PK")
    assert main(["shard", "secret/step.onnx", "--ranks", "2", "--config", "gopt.toml", "--reproducer", "r.zip"]) == 70
    kept = record(here / "r.zip")
    assert [each["files"].keys() for each in kept["inputs"]] == [{"step.onnx"}, {"gopt.toml"}]
    with zipfile.ZipFile(here / "r.zip") as archive:
        everything = b"".join(archive.read(name) for name in archive.namelist())
    for secret in (b"environment-secret", b"secret/", str(here).encode()):
        assert secret not in everything
    assert main(["reproduce", "r.zip"]) == 0


def test_values_and_data_stay_outside(here):
    (here / "values.npz").write_bytes(b"not an archive, secret")
    assert main(["shard", MODEL, "--ranks", "2", "--state", "values.npz", "--reproducer", "r.zip"]) == 3
    assert record(here / "r.zip")["left_out"] == ["--state"]
    assert b"secret" not in (here / "r.zip").read_bytes()


def test_a_success_and_a_refused_command_line_leave_nothing(here, capsys):
    assert main(["inspect", MODEL, "-q", "--reproducer", "r.zip"]) == 0
    assert main(["shard", MODEL, "--reproducer", "r.zip", "--stage", "9"]) == 2
    assert "could not be written: the command line itself was refused" in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize("taken", ["file", "folder", "no folder"])
def test_a_reproducer_that_cannot_be_written_hides_no_failure(taken, here, capsys):
    path = here / "r.zip"
    if taken == "file":
        path.write_text("mine")
    elif taken == "folder":
        path.mkdir()
    else:
        path = here / "missing/r.zip"
    assert main(["-q", "shard", MODEL, "--mesh", "nix=2", "--reproducer", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("gopt: error: no mesh axis is called 'nix'")
    assert said[-1].startswith("gopt: note: the reproducer could not be written: ")
    assert taken != "file" or path.read_text() == "mine"


def test_extract_shows_the_command_and_the_model(here, capsys):
    assert main(["shard", MODEL, "--mesh", "nix=2", "--reproducer", "r.zip"]) == 2
    assert main(["reproduce", "r.zip", "--extract", "out"]) == 0
    assert capsys.readouterr().out == "gopt shard out/input_0/mlp_sgd.onnx --mesh=nix=2\n"
    onnx.checker.check_model(str(here / "out/input_0/mlp_sgd.onnx"), full_check=True)
    assert main(["reproduce", "r.zip", "--extract", "out"]) == 2


HOSTILE = {
    "code": ("export", [{"text": "os:system"}]),
    "itself": ("reproduce", [{"input": 0}]),
    "a file to write": ("shard", [{"input": 0}, {"option": "-o", "text": "/tmp/x"}]),
    "a file to read": ("shard", [{"input": 0}, {"option": "--config", "text": "/etc/passwd"}]),
    "data": ("run", [{"input": 0}, {"option": "--data", "text": "os:system"}]),
    "a path": ("shard", [{"text": "/etc/passwd"}]),
    "an option in a text": ("shard", [{"input": 0}, {"option": "--force", "text": "x"}]),
    "unknown": ("shard", [{"input": 0}, {"option": "--nix", "text": "x"}]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_reproducer_names_no_file_and_runs_no_code(name, here, capsys):
    assert main(["shard", MODEL, "--mesh", "nix=2", "--reproducer", "r.zip"]) == 2
    with zipfile.ZipFile(here / "r.zip") as archive:
        members = {each: archive.read(each) for each in archive.namelist()}
    command, arguments = HOSTILE[name]
    kept = json.loads(members["reproducer.json"]) | {"command": command, "arguments": arguments}
    members["reproducer.json"] = json.dumps(kept).encode()
    with zipfile.ZipFile(here / "h.zip", "w") as archive:
        for each, data in members.items():
            archive.writestr(each, data)
    capsys.readouterr()
    assert main(["reproduce", "h.zip"]) == 3
    assert "gopt: error: " in capsys.readouterr().err


def test_every_option_with_a_path_is_known():
    """A new option that names a file must say whether a reproducer may hold it."""
    known = command_line.INPUTS | command_line.CONFIGURATIONS | command_line.OUTPUTS | command_line.LEFT_OUT
    known |= command_line.NAMES_OR_FILES
    words = ("FILE", "DIR", "DATA", "MODEL", "CKPT", "FOLDER", "PATH")
    for name in command_line.COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None and any("--reproducer" in param.opts for param in command.params)
        for param in command.params:
            names_path = any(word in (param.metavar or "") for word in words) or isinstance(param, click.Argument)
            assert not names_path or param.name in known | {"reproducer", "name"}, f"{name} {param.opts}"
    assert set(COMMANDS) - set(command_line.COMMANDS) <= {
        "demo", "derive", "doctor", "export", "import", "init", "passes", "help", "reproduce", "reduce", "load-state",
        "golden", "report", "seal",
    }  # fmt: skip


def test_an_unknown_name_is_reproduced(here, capsys):
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out"]) == 0
    assert main(["explain", "out", "nix", "--reproducer", "r.zip"]) == 2
    assert main(["reproduce", "r.zip"]) == 0
    assert "gopt explain fails in the same way" in capsys.readouterr().out


def test_a_name_in_a_reproducer_is_no_option():
    """A reproducer may come from anybody, and --reproducer would write a file."""
    argument = Argument(option="", text="--reproducer=elsewhere")
    params = [("", "folder", False), ("", "name", False)]
    with pytest.raises(InputError, match="is an option, not a name"):
        command_line._words(argument, params, Path, Path())


# --- reduce -----------------------------------------------------------------------------------------------------------


def nodes(path: Path) -> list[str]:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return [node.op_type for node in model.graph.node]


@pytest.mark.rest
def test_a_crash_is_reduced_from_its_reproducer(here, crash, capsys):
    assert main(["shard", MODEL, "--ranks", "2", "--reproducer", "r.zip"]) == 70
    assert main(["reduce", "r.zip", "-o", "small.onnx", "--json", "-q", "--tries", "80"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["format"] == "gopt-reduction/1"
    assert said["nodes_before"] == 52 and said["tries"] <= 80
    assert "LogSoftmax" in nodes(here / "small.onnx") and len(nodes(here / "small.onnx")) <= 26
    capsys.readouterr()
    assert main(["shard", "small.onnx", "--ranks", "2"]) == 70
    assert main(["reduce", "r.zip", "-o", "small.onnx"]) == 2, "it exists"


def test_a_refused_structure_in_the_middle_is_found(here, capsys):
    b = Builder()
    net = perceptron(b, (4,) * 8)
    b.op("Gradient", "x", xs=["x"], y="x", domain="ai.onnx.preview.training")
    b.extra_domains.append("ai.onnx.preview.training")
    sgd(b, net)
    b.output("odd", next(node.output[0] for node in b.nodes if node.op_type == "Gradient"), (4, 4))
    b.save(here / "step.onnx")
    assert main(["shard", "step.onnx", "--ranks", "2"]) == 4
    assert main(["reduce", "step.onnx", "-o", "small.onnx", "--", "shard", "{}", "--ranks", "2"]) == 0
    model = onnx.load(here / "small.onnx")
    assert [node.op_type for node in model.graph.node] == ["Gradient"]
    assert main(["shard", "small.onnx", "--ranks", "2"]) == 4


@pytest.mark.rest
def test_a_wrong_rank_file_is_reduced_with_verify(here, monkeypatch, capsys):
    """The ranks' Sub of an update adds: verify sees another state."""
    write = ranks.write_ranks

    def wrong(files, *arguments, **options):
        write(files, *arguments, **options)
        for path in files.folder.glob("rank_*.onnx"):
            model = onnx.load(path, load_external_data=False)
            for node in model.graph.node:
                if node.op_type == "Sub" and node.output[0].startswith("gopt.shard"):
                    node.op_type = "Add"
            path.write_bytes(model.SerializeToString())
            files.files[path.name] = FileEntry.of_file(path)

    monkeypatch.setattr(ranks, "write_ranks", wrong)
    b = Builder()
    sgd(b, perceptron(b, (4, 4, 4)))
    b.save(here / "step.onnx")
    check = ["shard", "step.onnx", "--ranks", "2", "--no-prove", "-o", "out"]
    check += ["--then", "verify", "out", "--steps", "1"]
    assert main(["reduce", "step.onnx", "-o", "small.onnx", "--tries", "25", "--", *check]) == 0
    assert "exit code 1, result: parameter" in capsys.readouterr().out
    assert len(nodes(here / "small.onnx")) <= 15 < len(b.nodes)


def test_a_program_of_the_user_may_decide(here):
    check = "import sys; sys.exit(9 if b'Relu' in open(sys.argv[1], 'rb').read() else 0)"
    words = [sys.executable, "-c", check, "{}"]
    assert main(["reduce", MODEL, "-o", "small.onnx", "--tries", "4", "--", *words]) == 0
    assert "Relu" in nodes(here / "small.onnx") and len(nodes(here / "small.onnx")) < 52


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the failing command is missing"),
        (["--", "shard", "x.onnx"], "does not name the model"),
        (["--", "inspect", "{}", "-q"], "does not fail on the whole model"),
        (["--", "nix-no-such-program", "{}"], "cannot be run"),
    ],
)
def test_what_cannot_be_reduced_is_refused(words, message, here, capsys):
    assert main(["reduce", MODEL, "-o", "small.onnx", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (here / "small.onnx").exists()


@pytest.mark.parametrize("number", part([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], 1))
def test_a_signal_ends_the_reduction_its_program_and_its_scratch_files(number, here):
    scratch, begun = here / "scratch", here / "begun"
    scratch.mkdir()
    os.mkfifo(begun)
    program = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    command = [sys.executable, "-m", "gopt.cli", "reduce", MODEL, "-o", "small.onnx", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", program, "{}"], env={**os.environ, "TMPDIR": str(scratch)},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    searching = int(begun.read_text())
    assert list(scratch.iterdir())
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + number and said.count("gopt: error:") == 1, said
    assert not list(scratch.iterdir()) and not (here / "small.onnx").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(searching, 0)
