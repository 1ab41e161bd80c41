"""``-q``, ``-v``, ``gopt help``, and the ``format`` of every ``--json``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import numpy as np
import pytest
from gopt.cli.main import COMMANDS, group, main
from gopt.cli.options import arguments_of
from gopt.cli.verbosity import Verbosity, restored, set_verbosity, verbosity
from helpers import FIXTURES

MODEL, ARTIFACTS = str(FIXTURES / "mlp_sgd.onnx"), str(FIXTURES / "ort" / "mlp_sgd")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verbosity")
    assert main(["shard", MODEL, "--ranks", "2", "-o", str(folder / "out"), "-q"]) == 0
    assert main(["merge", str(folder / "out"), "--state-dict", str(folder / "held.safetensors"), "-q"]) == 0
    np.savez(folder / "d.npz", x=np.zeros((64, 32), "f4"), y=np.zeros(64, "i8"))
    return folder


def case(name: str, made: Path) -> list[str]:
    out, train = str(made / "out"), ["--data", str(made / "d.npz"), "--steps", "1", "--set", "lr=0.1"]
    return {
        "shard": ["shard", MODEL, "--ranks", "2", "--dry-run"],
        "inspect a model": ["inspect", MODEL],
        "inspect a folder": ["inspect", out],
        "plan": ["plan", MODEL, "--ranks", "2"],
        "plan servers": ["plan", MODEL, "--trainers", "2", "--servers", "2"],
        "split": ["split", MODEL, "--trainers", "2", "--servers", "1", "--dry-run"],
        "diff": ["diff", out, out],
        "merge": ["merge", out, "-o", str(made / "merged.onnx"), "--force"],
        "reshard": ["reshard", out, "--ranks", "3", "-o", str(made / "other"), "--force"],
        "seal": ["seal", out],
        "prove": ["prove", out],
        "verify": ["verify", out, "--steps", "1", "--no-confirm"],
        "run": ["run", out, *train],
        "passes": ["passes"],
        "explain": ["explain", out, "loss"],
        "merge, explained": ["merge", out, "--explain"],
        "merge a state dict": ["merge", out, "--state-dict", str(made / "d.safetensors"), "--force"],
        "load-state": ["load-state", MODEL, str(made / "held.safetensors"), "-o", str(made / "l.onnx"), "--force"],
        "import": ["import", ARTIFACTS, "-o", str(made / "step.onnx"), "--force"],
        "report": ["report", out, "--html", str(made / "page.html"), "--force"],
        "demo": ["demo", str(made / "demo"), "--force"],
        "init": ["init", str(made / "made.py"), "--force"],
        "doctor": ["doctor"],
    }[name]


CASES = {
    "shard": "gopt-report", "inspect a model": "gopt-inspection", "inspect a folder": "gopt-inspection",
    "plan": "gopt-plan", "plan servers": "gopt-plan", "split": "gopt-report", "diff": "gopt-diff",
    "merge": "gopt-merge", "merge, explained": "gopt-provenance", "seal": "gopt-seal", "reshard": "gopt-report",
    "prove": "gopt-proof", "verify": "gopt-verification", "run": "gopt-run",
    "passes": "gopt-passes", "explain": "gopt-explanation", "merge a state dict": "gopt-merge",
    "load-state": "gopt-load-state", "import": "gopt-import",
    "report": "gopt-report-page", "demo": "gopt-demo", "init": "gopt-init", "doctor": "gopt-doctor",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_quiet_prints_nothing_and_json_still_prints_a_record_with_its_format(name, made, capsys):
    assert main([*case(name, made), "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*case(name, made), "-q", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    kind, version = json.loads(said.out)["format"].split("/")
    assert kind == CASES[name] and int(version) >= 1


def test_every_command_with_json_is_among_the_cases():
    with_json = set()
    for name in COMMANDS:
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if any("--json" in param.opts for param in command.params):
            with_json.add(name)
    elsewhere = {
        "derive",
        "export",
        "reproduce",
        "reduce",
    }  # test_derive.py, test_pytorch_export.py, test_reproduce.py: they need a model, torch, or a failure
    assert with_json - elsewhere <= {name.split()[0].strip(",") for name in CASES}


def test_quiet_still_tells_errors(capsys):
    assert main(["-q", "inspect", "missing.onnx"]) == 3
    assert capsys.readouterr().err.startswith("gopt: error: ")


def test_verbose_names_each_phase_with_its_seconds(capsys):
    assert main(["shard", MODEL, "--ranks", "2", "--dry-run", "-v"]) == 0
    lines = capsys.readouterr().err.splitlines()
    phases = [re.fullmatch(r"gopt: note: (.+): \d+\.\d{3} s", line) for line in lines]
    named = [found[1] for found in phases if found is not None]
    assert len(named) == len(lines) and named[:2] == ["reading the model", "finding roles"]
    assert {"pass shard", "making ranks", "checking ranks"} <= set(named)


def test_quiet_and_verbose_do_not_go_together(capsys):
    assert main(["passes", "-q", "-v"]) == 2
    assert main(["-v", "passes", "-q"]) == 2
    assert "cannot be combined" in capsys.readouterr().err


def test_a_setting_ends_with_its_command_and_is_handed_to_other_processes():
    assert main(["passes", "-q"]) == 0
    assert verbosity() is Verbosity.NORMAL
    with restored():
        set_verbosity(Verbosity.QUIET)
        assert arguments_of(click.Context(click.Command("run")), ()) == ["--quiet"]


def test_help_shows_the_list_or_one_command(capsys):
    assert main(["help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert main(["help", "merge"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Usage: gopt merge ") and "Example:" in told
    assert main(["help", "mrge"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "gopt: error: no command is called 'mrge': did you mean 'merge'?", "  hint: see gopt --help"
    ]  # fmt: skip


def test_the_shell_completes_commands_and_options(monkeypatch, capsys):
    monkeypatch.setenv("_GOPT_COMPLETE", "bash_complete")
    for words, wanted in (("gopt sh", "plain,shard"), ("gopt merge --fo", "plain,--force")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit) as ended:
            main([])
        assert ended.value.code == 0
        assert wanted in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("flags", [["golden", "-q", "update"], ["golden", "update", "-q"]])
def test_commands_of_a_group_are_quiet_too(flags, tmp_path, capsys):
    (tmp_path / "gopt-golden.toml").write_text(f'[case.two]\nmodel = "{MODEL}"\noptions = ["--ranks", "2"]\n')
    assert main([*flags, str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "golden/two.txt").exists()
