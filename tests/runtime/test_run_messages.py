"""What ``gopt run`` tells of a run that is not as one thought: resumed, with bad numbers, without a launcher."""

from __future__ import annotations

import builtins
import json
import os
import re
import selectors
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gopt.cli.main import main
from test_run import command, mpi, run, samples, settings, train, written

from gopt.artifact.checkpoint_index import LOCK_FILE
from gopt.errors import OptionError, RunError, StoppedError
from gopt.runtime.engines import launch
from gopt.runtime.engines.processes import RankProcesses
from gopt.runtime.runtime_errors import MAX_TEXT, node_error
from gopt.system.lock import lock_file


def ran(folder: Path, data: str, steps: int, *more: str, lr: str = "") -> int:
    """The command in this process."""
    given = {name: lr or value for name, value in settings(folder).items()}
    sets = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
    return main(["run", str(folder), "--data", data, "--steps", str(steps), *sets, *more])


def test_a_resumed_run_says_from_where(tmp_path, capsys):
    folder, data, root = written(tmp_path), samples(tmp_path), tmp_path / "c"
    train(folder, data, 4, checkpoint=root, every=2)
    assert ran(folder, data, 6, "--checkpoint", str(root), "--resume", "--json") == 0
    said = capsys.readouterr()
    assert said.err == f"gopt: note: resumes at step 4, {root}/step_00000004\n"
    record = json.loads(said.out)
    assert (record["resumed"], record["steps"], record["asked"]) == (4, 2, 6)


def test_a_run_that_is_done_names_its_step_and_the_one_asked_for(tmp_path, capsys):
    folder, data, root = written(tmp_path), samples(tmp_path), tmp_path / "c"
    train(folder, data, 4, checkpoint=root)
    assert ran(folder, data, 3, "--checkpoint", str(root), "--resume") == 0
    said = capsys.readouterr()
    assert said.out == f"nothing to do: {root} is at step 4 already, and --steps 3 counts from the start of training\n"
    assert said.err == ""
    assert ran(folder, data, 3, "--checkpoint", str(root), "--resume", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["resumed"], record["steps"], record["asked"]) == (4, 0, 3)


@pytest.mark.parametrize(
    ("exists", "launched"),
    [
        (True, False),
        pytest.param(False, True, marks=[mpi, pytest.mark.slow]),
        pytest.param(True, True, marks=[mpi, pytest.mark.slow]),
    ],
)
def test_nothing_to_resume_is_no_secret(exists, launched, tmp_path):
    folder, root = written(tmp_path), tmp_path / "mistyped"
    if exists:
        root.mkdir()
    more = ["--launch", "2"] if launched else []
    done = run(command(folder, samples(tmp_path), 2, "--checkpoint", str(root), "--resume", "--json", *more))
    assert done.returncode == 0, done.stderr
    what = "has no complete checkpoint" if exists else "does not exist"
    assert done.stderr == f"gopt: note: {root} {what}: training starts from the beginning\n"
    assert json.loads(done.stdout)["resumed"] is None


@pytest.mark.parametrize("what", ["damaged", "other ranks", "busy", "no whole one, and busy"])
def test_nothing_is_announced_that_does_not_come(what, tmp_path, capsys):
    folder, data, root = written(tmp_path), samples(tmp_path), tmp_path / "c"
    held = None
    if what.startswith("no"):
        root.mkdir()
    else:
        train(folder, data, 4, checkpoint=root)
    if what == "damaged":
        (root / "step_00000004" / "rank_0001.safetensors").write_bytes(b"")
    elif what == "other ranks":
        index = root / "step_00000004" / "index.json"
        index.write_text(json.dumps(json.loads(index.read_text()) | {"manifest": "0" * 64}))
    else:
        held = lock_file(root / LOCK_FILE)
    assert ran(folder, data, 6, "--checkpoint", str(root), "--resume") == 5
    said = capsys.readouterr().err
    assert said.startswith("gopt: error: ") and "goes on" not in said.splitlines()[0] and "note" not in said
    if held is not None:
        os.close(held)


def test_the_end_of_a_run_names_the_checkpoint_and_the_rate(tmp_path, capsys):
    folder, data, root = written(tmp_path), samples(tmp_path), tmp_path / "c"
    assert ran(folder, data, 3, "--checkpoint", str(root), "--log", str(tmp_path / "log")) == 0
    said = capsys.readouterr().out
    assert f"last checkpoint: {root}/step_00000003\n" in said
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    seconds = sum(line["seconds"] for line in lines)
    rate = float(said.splitlines()[0].rpartition("step, ")[2].removesuffix(" samples/s"))
    assert rate == pytest.approx(8 * 3 / seconds, rel=1e-3, abs=0.51)  # shown in whole samples: few on a busy machine


# --- numbers that are none ------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_is_told_at_the_end(tmp_path, capsys):
    folder, data = written(tmp_path), samples(tmp_path)
    assert ran(folder, data, 5, lr="3e38") == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    assert "not finite in 4 steps, first in step 2" in warnings[0]
    log = tmp_path / "log"
    assert ran(folder, data, 5, "--json", "--log", str(log), lr="3e38") == 0
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said["not_finite"] == {"steps": 4, "first": 2} and said["last"]["loss"] is None
    losses = [json.loads(line, parse_constant=pytest.fail)["loss"] for line in log.read_text().splitlines()]
    assert losses[0] is not None and losses[1:] == [None] * 4
    assert ran(folder, data, 5) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=[mpi, pytest.mark.slow])])
def test_one_rank_says_that_the_loss_is_no_number(launched, tmp_path):
    """All ranks have it at once: the update spoiled every parameter."""
    folder = written(tmp_path)
    arguments = [part.replace("=0.05", "=3e38") for part in command(folder, samples(tmp_path), 9, "--stop-on-nan")]
    done = run([*arguments, *(["--launch", "2"] if launched else [])])
    assert done.returncode == 5
    line, *hints = done.stderr.splitlines()
    assert re.fullmatch(r"gopt: error: rank [01], step 2: the loss is (nan|inf)", line)
    assert len(hints) == 1 and hints[0].startswith("  hint: "), done.stderr


TOLD = (
    "[ONNXRuntimeError] : 1 : FAIL : Error in execution: Non-zero status code returned while running {} node. "
    "Name:'{}' Status Message: {}"
)


@pytest.mark.parametrize(
    ("text", "said", "hinted"),
    [
        (
            TOLD.format("Gather", "wte", "indices element out of data bounds, idx=99 must be within the inclusive "
                        "range [-9,8]"),
            "ONNX Runtime failed: Gather 'wte': index 99 is out of range, -9 to 8", True,
        ),
        (
            TOLD.format("Gemm", "", "/onnxruntime_src/core/gemm.cc:12 GEMM:\n Dimension mismatch"),
            "ONNX Runtime failed: Gemm: GEMM: Dimension mismatch", False,
        ),
        (
            TOLD.format("Mul", "m", "/src/core/bfc_arena.cc:376 void* onnxruntime::BFCArena::Allocate(size_t, bool) "
                        "Failed to allocate 12 (of 9) bytes"),
            "ONNX Runtime failed: Mul 'm': Failed to allocate 12 (of 9) bytes", False,
        ),
        ("", "ONNX Runtime failed: RuntimeError", False),
        ("something else\nin two lines", "ONNX Runtime failed: something else in two lines", False),
    ],
)  # fmt: skip
def test_the_runtimes_words_are_shortened(text, said, hinted):
    error = node_error(RuntimeError(text))
    assert (error.message, bool(error.hints)) == (said, hinted)
    assert len(node_error(RuntimeError("x" * 5000)).message) < MAX_TEXT + 30


def test_an_index_out_of_range_is_told_of_with_rank_and_step(tmp_path, capsys):
    """What the runtime itself says of it, not what it is thought to say."""
    from helpers import FIXTURES

    model = str(FIXTURES / "mlp_adamw.onnx")
    assert main(["shard", model, "--ranks", "1", "-o", str(tmp_path / "out")]) == 0
    np.savez(tmp_path / "bad.npz", x=np.zeros((16, 32), "f4"), y=np.array([3] * 8 + [12] * 8))
    capsys.readouterr()
    given = ["--data", str(tmp_path / "bad.npz"), "--steps", "2", "--set", "lr=1e-3"]
    assert main(["run", str(tmp_path / "out"), *given]) == 5
    line, hint = capsys.readouterr().err.splitlines()
    assert line.startswith("gopt: error: rank 0, step 2: ONNX Runtime failed: ")
    assert line.endswith("index 12 is out of range, -10 to 9")
    assert "label" in hint


# --- the request ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["mpi", "nccl"])
def test_processes_without_a_launcher(engine, tmp_path):
    done = run(command(written(tmp_path), "faulty_data:batches", 2, "--engine", engine))
    assert done.returncode == 2
    line, hint = done.stderr.splitlines()
    assert f"--engine {engine}" in line and "no launcher" in line
    assert "--launch 2" in hint


@pytest.mark.parametrize(("engine", "extra"), [("mpi", "gopt[mpi]"), ("nccl", "gopt[nccl]")])
@pytest.mark.parametrize("launched", [False, True])
def test_the_advice_names_what_brings_the_engine(engine, extra, launched, tmp_path, monkeypatch, capsys):
    """No mpi4py: as where gopt was installed bare."""
    real = builtins.__import__

    def bare(name: str, *rest: Any) -> Any:
        if name == "mpi4py":
            raise ImportError("No module named 'mpi4py'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", bare)
    if launched:
        monkeypatch.setenv("PMI_RANK", "0")
    more = [] if launched else ["--launch", "2"]
    assert ran(written(tmp_path), samples(tmp_path), 2, "--engine", engine, *more) == 5
    assert f"pip install '{extra}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "said"), [("folder", "is the folder of ranks itself"), ("step", "is a single checkpoint")]
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_checkpoint_has_a_place_of_its_own(place, said, resume, tmp_path):
    folder, data = written(tmp_path), samples(tmp_path)
    train(folder, data, 2, checkpoint=tmp_path / "c")
    target = folder if place == "folder" else tmp_path / "c" / "step_00000002"
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(OptionError, match=said):
        train(folder, data, 3, checkpoint=target, resume=resume)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("where", ["file", "file/below", "step"])
def test_a_checkpoint_that_cannot_be_written_is_told_before_the_first_step(where, tmp_path):
    folder, data, told = written(tmp_path), samples(tmp_path), []
    (tmp_path / "file").write_text("mine")
    root = tmp_path / ("c" if where == "step" else where)
    if where == "step":
        root.mkdir()
        (root / "step_00000003").write_text("mine")
    with pytest.raises(RunError, match="cannot write checkpoint"):
        told += train(folder, data, 3, checkpoint=root)
    assert not told and (tmp_path / "file").read_text() == "mine"
    if where == "step":
        assert not list(root.glob(".step*")), "no step was taken, so nothing was begun"


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_place_is_told_before_the_first_step(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(RunError, match="cannot write checkpoint"):
        train(written(tmp_path), samples(tmp_path), 3, checkpoint=tmp_path / "closed" / "c")


def test_a_signal_that_meets_ranks_at_their_end_is_the_exit_code(tmp_path: Path) -> None:
    """Ranks that have done their work listen no more: the signal ends them as the system does."""
    job = RankProcesses({}, selectors.DefaultSelector(), {0: -signal.SIGTERM, 1: 0})
    with pytest.raises(StoppedError) as raised:
        launch._JobMonitor(job, tmp_path, 5.0, print, caught=[signal.SIGTERM]).run()
    assert raised.value.exit_code == 128 + signal.SIGTERM
