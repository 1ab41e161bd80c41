"""Every exit code of the contract, each with one line on stderr and nothing written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, Builder, edit_ranks, perceptron, sgd
from onnx import helper

import gopt

MODEL = str(FIXTURES / "mlp_adamw.onnx")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def says(capsys, arguments: list[str], code: int, *words: str) -> str:
    """Run a command that fails with one line, then hints, and that writes nothing; returns the line."""
    before = sorted(str(path) for path in Path().rglob("*"))
    assert main(arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    line, *hints = said.err.lstrip("\n").splitlines()  # an interrupt leaves the line that ^C stands on
    assert line.startswith("gopt: error: ")
    assert all(hint.startswith("  hint: ") for hint in hints), said.err
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err
    assert sorted(str(path) for path in Path().rglob("*")) == before
    return line


def test_a_value_behind_a_switch_is_named(capsys):
    """``--resume ckpt`` is easily written; the folder is ``--checkpoint``'s."""
    given = ["run", "d", "--data", "x.npz", "--steps", "3", "--resume", "ckpt"]
    line = says(capsys, given, 2, "hint: --resume takes no value")
    assert "extra argument (ckpt)" in line


# --- 0 and 1 --------------------------------------------------------------------------------------------------------


def test_0_and_1_of_verify(capsys):
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out"]) == 0
    assert main(["verify", "out", "--steps", "1", "--no-confirm"]) == 0

    def plant(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "reduce":
                    attribute.s = b"sum"

    edit_ranks(Path("out"), plant)
    capsys.readouterr()
    assert main(["verify", "out", "--steps", "1", "--no-confirm", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["equal"] is False
    worst = record["worst"]["gradients as they are"]
    assert worst["error_over_tolerance"] > 1
    assert main(["verify", "out", "--steps", "1", "--no-confirm"]) == 1
    assert f"{worst['error_over_tolerance'] * record['tolerance']:.2e}" in (said := capsys.readouterr().out), (
        "a relative error"
    )
    assert "(tolerance 0.0001)" in said.splitlines()[0]


# --- 2: the request is wrong ----------------------------------------------------------------------------------------

WRONG = {
    "no ranks": ([], "--ranks"),
    "zero ranks": (["--ranks", "0"], "0"),
    "negative ranks": (["--ranks", "-1"], "-1"),
    "no number": (["--ranks", "two"], "two"),
    "ranks and mesh": (["--ranks", "2", "--mesh", "shard=3"], "disagree"),
    "no mesh": (["--mesh", "shard"], "shard"),
    "an empty axis": (["--mesh", "shard=0"], "0"),
    "an unknown pass": (["--ranks", "2", "--pipeline", "shart,prune"], "did you mean 'shard'"),
    "an unknown option of a pass": (["--ranks", "2", "--pipeline", "shard{stag=1}"], "did you mean 'stage'"),
    "a bad value": (["--ranks", "2", "--pipeline", "shard{stage=9}"], "9"),
    "a pass twice": (["--ranks", "2", "--pipeline", "shard,shard"], "twice"),
    "an order that cannot work": (["--ranks", "2", "--pipeline", "prune,shard"], "prune"),
    "an unreadable pipeline": (["--ranks", "2", "--pipeline", "shard{"], "pipeline"),
    "an empty pipeline": (["--ranks", "2", "--pipeline", ""], "empty"),
    "an unknown option": (["--ranks", "2", "--fast"], "--fast"),
    "an unknown stage": (["--ranks", "2", "--stage", "4"], "4"),
    "a negative bucket": (["--ranks", "2", "--bucket-mb", "-1"], "-1"),
    "ranks that are not there": (["--ranks", "2", "--only-ranks", "0-2"], "2"),
    "unreadable ranks": (["--ranks", "2", "--only-ranks", "1-"], "1-"),
    "an unknown pass to print": (["--ranks", "2", "--print-after", "shart"], "shart"),
    "a folder for no prints": (["--ranks", "2", "--print-dir", "texts"], "--print-after"),
    "a state that names no output": (["--ranks", "2", "--states", "w"], "--states"),
    "a loss that is none": (["--ranks", "2", "--loss", "nix"], "nix"),
}


@pytest.mark.parametrize("what", WRONG)
def test_2_bad_usage(what, capsys):
    arguments, word = WRONG[what]
    says(capsys, ["shard", MODEL, *arguments], 2, word)


@pytest.mark.parametrize(
    "arguments", [["shard"], ["shrad", MODEL], ["verify"], ["verify", "a", "b", "c"], ["passes", "x"], ["--nix"]]
)
def test_2_no_such_command_or_too_few_arguments(arguments, capsys):
    says(capsys, arguments, 2)


def test_2_comes_before_any_work(capsys):
    """A bad option is told even where the model is missing: nothing was read."""
    says(capsys, ["shard", "missing.onnx", "--ranks", "0"], 2)
    says(capsys, ["shard", "missing.onnx", "--ranks", "2", "--pipeline", "nix"], 2)
    says(capsys, ["shard", "missing.onnx", "--ranks", "2", "--pipeline", "prune,shard"], 2)


def test_2_an_existing_folder(capsys):
    Path("mlp_adamw.ranks").mkdir()
    Path("mlp_adamw.ranks/mine").write_text("keep")
    says(capsys, ["shard", MODEL, "--ranks", "2"], 2, "mlp_adamw.ranks exists already", "choose another folder")
    assert Path("mlp_adamw.ranks/mine").read_text() == "keep"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[mesh]\nshard = 2\n[pass.nix]\na = 1\n", "nix"),
        ("[mesh]\nshard = 2\n[pass.shard]\nnix = 1\n", "nix"),
        ("[mesh]\nshard = 2\n[pipeline]\npasses = ['nix']\n", "nix"),
        ("[mesh]\nshard = 2\n[pass.shard]\nstage = 'two'\n", "two"),
    ],
)
def test_2_a_configuration_that_cannot_be(text, word, capsys):
    Path("gopt.toml").write_text(text)
    says(capsys, ["shard", MODEL, "--config", "gopt.toml", "--dry-run"], 2, word)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mesh\n", "gopt.toml is not TOML: "),
        ("[nix]\na = 1\n", "gopt.toml: there is no key 'nix'"),
        ("[mesh]\nshard = 'two'\n", "gopt.toml: mesh.shard: 'two' is not of type \"integer\""),
        ("[mesh]\nshard = true\n", 'gopt.toml: mesh.shard: True is not of type "integer"'),
        ("[mesh]\nshard = 2.0\n", 'gopt.toml: mesh.shard: 2.0 is not of type "integer"'),
        ("[mesh]\nshard = inf\n", "gopt.toml: mesh.shard: inf is not allowed here"),
        ("[mesh]\nshard = 99999999999999999999\n", "gopt.toml: mesh.shard: a number of more than 63 bits"),
        ("[mesh]\nshard = 2026-11-22\n", "gopt.toml: mesh.shard: a date or a time is not allowed here"),
        ("[mesh]\nshard = 2\nshard = 3\n", "gopt.toml is not TOML: "),
        ("mesh" + ".a" * 400 + " = 1\n", "gopt.toml is nested more than 32 levels deep"),
        ("mesh" + ".a" * 501 + " = 1\n", "gopt.toml: line 1 has more than 500 dots (CONFIG_LINE_DOTS)"),
        (("a" + ".a" * 99 + " = 1\n") * 102, "gopt.toml has more than 10000 dots (CONFIG_DOTS)"),
        ("#" * 65537, "gopt.toml is too long: 65537 bytes, at most 65536 are read"),
        ("a = " + "[" * 5000 + "]" * 5000 + "\n", "gopt.toml is nested more than 32 levels deep"),
        ("mesh = 3\n", 'gopt.toml: mesh: 3 is not of type "object"'),
        ("pass = 3\n[mesh]\nshard = 2\n", "pass: "),
        ("[mesh]\nshard = 2\n[pass]\nshard = 3\n", "pass.shard: "),
        ("[mesh]\nshard = 2\n[pipeline]\npasses = 3\n", "pipeline.passes: "),
        ("[mesh]\nshard = 2\n[pipeline]\nnix = 1\n", "pipeline: "),
        ("[mesh]\nshard = 2\n[roles]\nnix = 1\n", "roles: "),
        ("roles = 3\n[mesh]\nshard = 2\n", "roles: "),
        ("[mesh]\nshard = 2\n[roles]\nstates = 3\n", "roles.states: "),
    ],
)
def test_3_a_configuration_that_is_not_as_its_schema_says(text, said, capsys):
    Path("gopt.toml").write_text(text)
    says(capsys, ["shard", MODEL, "--config", "gopt.toml", "--dry-run"], 3, said)


# --- 3: the input is wrong ------------------------------------------------------------------------------------------


def test_3_no_configuration(capsys):
    says(capsys, ["shard", MODEL, "--config", "gopt.toml"], 3, "gopt.toml")


def test_3_no_model(capsys):
    says(capsys, ["shard", "missing.onnx", "--ranks", "2"], 3, "missing.onnx")


@pytest.mark.parametrize("data", [b"", b"hello, world\n", b"\x00" * 100], ids=["empty", "text", "zeros"])
def test_3_no_onnx(data, capsys):
    Path("m.onnx").write_bytes(data)
    says(capsys, ["shard", "m.onnx", "--ranks", "2"], 3, "m.onnx")


def test_3_a_truncated_model(capsys):
    data = Path(MODEL).read_bytes()
    Path("m.onnx").write_bytes(data[: len(data) // 2])
    says(capsys, ["shard", "m.onnx", "--ranks", "2"], 3, "m.onnx")


def test_3_an_inference_graph(capsys):
    b = Builder()
    x, w = b.input("x", (4, 3)), b.parameter("w", (3, 2))
    b.output("y", b.op("MatMul", x, w), (4, 2))
    b.save(Path("m.onnx"))
    says(capsys, ["shard", "m.onnx", "--ranks", "2"], 3, "not a training step")


@pytest.mark.parametrize("stage", ["0", "2"])
def test_a_second_application(stage, capsys):
    assert main(["shard", MODEL, "--ranks", "2", "--stage", stage, "-o", "out"]) == 0
    capsys.readouterr()
    assert main(["shard", "out/rank_0000.onnx", "--ranks", "2"]) in (3, 4)
    assert capsys.readouterr().err.startswith("gopt: error: ")
    assert not Path("rank_0000.ranks").exists()


@pytest.mark.parametrize("spoil", ["folder", "manifest", "json", "format", "rank", "source"])
def test_3_an_incomplete_folder(spoil, capsys):
    assert main(["shard", MODEL, "--ranks", "2", "-o", "out"]) == 0
    capsys.readouterr()
    out = Path("out")
    if spoil == "folder":
        out = Path("nowhere")
    elif spoil == "manifest":
        (out / "manifest.json").unlink()
    elif spoil == "json":
        (out / "manifest.json").write_text("{")
    elif spoil == "format":
        (out / "manifest.json").write_text('{"format": "other/1"}')
    elif spoil == "rank":
        (out / "rank_0001.onnx").unlink()
    else:
        (out / "source.onnx").unlink()
    says(capsys, ["verify", str(out)], 3)


def test_3_ranks_that_were_left_out(capsys):
    assert main(["shard", MODEL, "--ranks", "3", "--only-ranks", "0", "-o", "out"]) == 0
    capsys.readouterr()
    for command in (["verify"], ["prove"], ["run", "--data", "d.npz", "--steps", "1"]):
        says(capsys, [*command, "out"], 3, "1 of 3 ranks")


# --- 4: recognised, not supported -----------------------------------------------------------------------------------


def test_4_one_of_two_losses(capsys):
    model = str(FIXTURES / "cases" / "losses" / "gan_out_d.onnx")
    says(capsys, ["shard", model, "--ranks", "2", "--loss", "loss", "-o", "out"], 4, "--loss loss,loss_g")


def test_4_an_unknown_operator_in_an_update(capsys):
    b = Builder()
    net = perceptron(b, (3, 2), bias=False)
    b.extra_domains.append("vendor.ops")
    net.gradients["w0"] = b.op(
        "Reshape", b.op("Fancy", net.gradients["w0"], domain="vendor.ops"), b.const([3, 2], "int64")
    )
    sgd(b, net)
    b.save(Path("m.onnx"))
    says(capsys, ["shard", "m.onnx", "--ranks", "2"], 4, "vendor.ops.Fancy")


def test_an_unknown_operator_in_the_forward_is_carried_along(capsys):
    b = Builder()
    b.extra_domains.append("vendor.ops")
    x = b.input("raw", (4, 3))
    seen = b.op("Fancy", x, domain="vendor.ops")
    net = perceptron(b, (3, 2))
    for node in b.nodes:
        node.input[:] = [seen if name == "x" else name for name in node.input]
    b.inputs = [value for value in b.inputs if value.name != "x"]
    sgd(b, net)
    model = b.model()
    model.graph.value_info.append(helper.make_tensor_value_info(seen, 1, (4, 3)))
    Path("m.onnx").write_bytes(model.SerializeToString())
    assert main(["shard", "m.onnx", "--ranks", "2", "-o", "out"]) == 0
    ranks = [onnx.load(f"out/rank_000{rank}.onnx", load_external_data=False) for rank in range(2)]
    assert all(any(node.op_type == "Fancy" for node in rank.graph.node) for rank in ranks)


def test_4_training_info(capsys):
    model = onnx.load(MODEL)
    model.training_info.add()
    Path("m.onnx").write_bytes(model.SerializeToString())
    says(capsys, ["shard", "m.onnx", "--ranks", "2"], 4, "training_info")


# --- 5: the run failed ----------------------------------------------------------------------------------------------


def test_5_a_target_below_a_file(capsys):
    Path("file").write_text("")
    says(capsys, ["shard", MODEL, "--ranks", "2", "-o", "file/out"], 5, "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_5_a_read_only_target(capsys):
    Path("closed").mkdir(mode=0o500)
    says(capsys, ["shard", MODEL, "--ranks", "2", "-o", "closed/out"], 5, "closed")


def test_2_force_replaces_only_what_gopt_wrote(capsys):
    Path("thesis").mkdir()
    Path("thesis/text").write_text("keep")
    says(capsys, ["shard", MODEL, "--ranks", "2", "-o", "thesis", "--force"], 2, "was not written by gopt")
    assert Path("thesis/text").read_text() == "keep"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("force", [False, True])
def test_5_a_full_disk(number, force, capsys, monkeypatch):
    if force:
        Path("out").mkdir()
    written = []
    real = os.write

    def full(file: int, data: bytes) -> int:
        written.append(file)
        if len(written) > 1:
            raise OSError(number, os.strerror(number))
        return real(file, data)

    monkeypatch.setattr(os, "write", full)
    says(capsys, ["shard", MODEL, "--ranks", "2", "-o", "out", *(["--force"] if force else [])], 5, "out")
    assert len(written) > 1


def test_5_ranks_that_call_differently(capsys):
    assert main(["shard", MODEL, "--ranks", "2", "--bucket-mb", "0", "-o", "out"]) == 0
    capsys.readouterr()

    def plant(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "ReduceScatter")
        next(each for each in node.attribute if each.name == "reduce").s = b"max"

    from helpers import edit_rank

    edit_rank(Path("out"), 1, plant)
    says(capsys, ["verify", "out", "--no-confirm"], 5, "rank 0", "rank 1")


# --- 70 and 130 -----------------------------------------------------------------------------------------------------


def test_70_a_defect(capsys, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("gopt.verbs.shard.shard_step", broken)
    says(capsys, ["shard", MODEL, "--ranks", "2"], 70, "defect", "ZeroDivisionError")


def test_a_traceback_with_debug_alone(capsys):
    assert main(["--debug", "shard", "missing.onnx", "--ranks", "2"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_130_an_interrupt(capsys, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gopt.verbs.shard.shard_step", interrupted)
    says(capsys, ["shard", MODEL, "--ranks", "2"], 130)


def test_130_an_interrupt_while_writing(capsys, monkeypatch):
    def interrupted(number: int, data: bytes) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    says(capsys, ["shard", MODEL, "--ranks", "2"], 130)


def stop(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGTERM)


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


WITH_TYPES_TO_INFER = str(FIXTURES / "mlp_ort_adamw.onnx")
WHERE_WORK_GOES_ON = ["onnx.shape_inference.infer_shapes", "gopt.ir.load.check_parts", "onnx.checker.check_model"]
"""Functions whose errors are taken for something else: for types that are not known, for a damaged file."""


@pytest.mark.parametrize("name", WHERE_WORK_GOES_ON)
def test_143_a_stop_is_never_taken_for_an_error(name, capsys, monkeypatch):
    monkeypatch.setattr(name, stop)
    says(capsys, ["shard", WITH_TYPES_TO_INFER, "--ranks", "2"], 143, "stopped by SIGTERM")


@pytest.mark.parametrize("name", WHERE_WORK_GOES_ON)
def test_5_too_little_memory_is_never_taken_for_another_error(name, capsys, monkeypatch):
    monkeypatch.setattr(name, no_memory)
    says(capsys, ["shard", WITH_TYPES_TO_INFER, "--ranks", "2"], 5, "out of memory")


def test_5_what_took_the_memory_is_free_when_it_is_said(capsys, monkeypatch):
    from gopt.cli import main as command_line

    class Large:
        pass

    held = []

    def fill(*_: object, **__: object) -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise MemoryError

    def said(*_: object) -> int:
        assert held[0]() is None
        return 5

    monkeypatch.setattr("gopt.ir.load.check_parts", fill)
    monkeypatch.setattr(command_line, "explain_error", said)
    assert main(["shard", MODEL, "--ranks", "2"]) == 5
    assert held


def test_130_a_signal(tmp_path):
    """From outside, in the midst of the work: nothing is left behind."""
    code = (
        "import sys, os, time\nfrom gopt.cli.main import main\n"
        "def slow(number, data):\n    print('writing', flush=True)\n    time.sleep(600)\n"
        "os.write = slow\n"
        f"sys.exit(main(['shard', {MODEL!r}, '--ranks', '2']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors.lstrip().startswith("gopt: error: ") and "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_the_api_raises_the_same(tmp_path):
    from gopt.errors import InputError, OptionError

    with pytest.raises(InputError):
        gopt.load(tmp_path / "missing.onnx")
    with pytest.raises(OptionError):
        gopt.shard(gopt.load(MODEL), 0)
