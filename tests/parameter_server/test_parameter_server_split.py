"""Splits as they are written: every fixture, what each role has, and laws that change the input but not its meaning."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
from helpers import ROOT, Builder, folder_bytes, perceptron, scramble, source

from gopt import api
from gopt.analysis.role_map import RoleMap
from gopt.artifact.manifest_check import read_manifest
from gopt.artifact.server_entries import KeyKind, Mode, PullAt
from gopt.errors import OptionError, UnsupportedError
from gopt.ir.load import load
from gopt.parameter_server.options import SplitOptions
from gopt.parameter_server.slicing import Slicing

NAMES = ("cnn_sgd", "emb_adamw", "mlp_adamw", "mlp_adamw_fp16_scaler", "mlp_lamb", "mlp_mom_clip_sched", "mlp_muon")


def options(**given: object) -> SplitOptions:
    return SplitOptions(**{"trainers": 2, "servers": 3, "minimum": 16, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_servers_hold_every_trained_state_once(name: str, servers: int, tmp_path: Path) -> None:
    made = api.split(source(name), options(servers=servers))
    made.write(tmp_path / "out")
    manifest, _ = read_manifest(tmp_path / "out")
    held: dict[str, list[tuple[int, int]]] = {}
    for rank in manifest.ranks:
        for state in rank.state if rank.role == "server" else ():
            for piece in state.pieces:
                held.setdefault(piece.tensor, []).append((piece.start, piece.stop))
    scalars = set(made.step.placement.shared)
    for state in manifest.states:
        ranges = held.get(state.tensor, [])
        if state.tensor in scalars:
            assert ranges == [(0, 1)] * servers
        elif state.tensor in made.step.placement.served:
            assert [stop for _, stop in sorted(ranges)][:-1] == [start for start, _ in sorted(ranges)][1:]
            assert sorted(ranges)[0][0] == 0 and sorted(ranges)[-1][1] == state.type.elements
        else:
            assert not ranges
    for path in (tmp_path / "out").glob("*.onnx"):
        load(path, own=True)


def test_trainers_run_no_update_and_hold_no_parameter(tmp_path: Path) -> None:
    made = api.split(source("mlp_adamw"), options())
    made.write(tmp_path / "out")
    trainer = onnx.load(tmp_path / "out/trainer.onnx", load_external_data=False).graph
    assert {each.name for each in trainer.input} == {"gopt.round", "x", "y"}
    assert {each.name for each in trainer.output} == {"loss", "gopt.done"}
    assert "Sqrt" not in {node.op_type for node in trainer.node}


def test_a_loss_scale_travels_with_pulls() -> None:
    keys = api.split(source("mlp_adamw_fp16_scaler"), options()).step.keys
    assert [key.name for key in keys if key.kind is KeyKind.SCALAR] == ["loss_scale"]


def test_a_loss_scale_travels_in_its_own_type_whatever_the_wire() -> None:
    """65536 is infinite in half precision."""
    made = api.split(source("mlp_adamw_fp16_scaler"), options(wire="float16"))
    wires = {key.kind: key.wire for key in made.step.keys}
    assert wires == {KeyKind.PARAMETER: "float16", KeyKind.SCALAR: "float32"}
    pulls = {tuple(n.attributes["keys"]): n.attributes["dtype"] for n in made.step.trainer.graph.nodes
             if n.op_type == "Pull"}  # fmt: skip
    assert pulls.pop(("loss_scale",)) == "float32" and set(pulls.values()) == {"float16"}


def test_with_pulls_at_the_end_trainers_hold_copies() -> None:
    made = api.split(source("mlp_adamw"), options(pull=PullAt.END))
    held = made.manifest().ranks[0].state
    assert {state.input for state in held} == set(made.step.plan.owners) and all(state.copy for state in held)


def test_without_rounds_a_key_is_one_piece() -> None:
    keys = api.split(source("mlp_adamw"), options(mode=Mode.ASYNC)).step.keys
    assert all(len(key.pieces) == 1 for key in keys)


def test_a_global_norm_needs_rounds() -> None:
    with pytest.raises(UnsupportedError, match="several parameters"):
        api.split(source("mlp_mom_clip_sched"), options(mode=Mode.ASYNC))


def test_servers_without_anything_are_valid(tmp_path: Path) -> None:
    made = api.split(source("mlp_sgd"), options(servers=7, slicing=Slicing.OFF))
    report = made.write(tmp_path / "out")
    assert any("no parameter" in note for note in report.notes)
    assert len(list((tmp_path / "out").glob("server_*.onnx"))) == 7


def test_names_do_not_matter(tmp_path: Path) -> None:
    model, names = scramble(onnx.load(f"{Path(__file__).parents[2]}/fixtures/mlp_adamw.onnx"))
    onnx.save(model, tmp_path / "other.onnx")
    one = api.split(source("mlp_adamw"), options()).manifest()
    other = api.split(api.load(tmp_path / "other.onnx"), options()).manifest()
    assert one.parameter_server is not None and other.parameter_server is not None
    for mine, theirs in zip(one.parameter_server.keys, other.parameter_server.keys, strict=True):
        assert [(names[p.tensor], p.start, p.stop) for p in mine.pieces] == [
            (p.tensor, p.start, p.stop) for p in theirs.pieces
        ]
        assert (mine.server, mine.bucket, mine.shape) == (theirs.server, theirs.bucket, theirs.shape)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        api.split(source("mlp_lamb"), options()).write(tmp_path / name)
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")


def test_the_report_says_what_each_role_lost(tmp_path: Path) -> None:
    api.split(source("mlp_adamw"), options()).write(tmp_path / "out")
    report = json.loads((tmp_path / "out/report.json").read_text())
    rows = {(op_type, group["ranks"]) for group in report["removed_ops"] for op_type in group["op_types"]}
    assert ("Gemm", "2-4") in rows and ("Sqrt", "0-1") in rows


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compensation": 1.0}, "--mode async"),
        ({"every": 2}, "--mode geo"),
        ({"count": "push"}, "--mode async"),
        ({"pull": PullAt.START, "accumulate": 2}, "--accumulate"),
        ({"trainers": 0}, "--trainers"),
        ({"minimum": 0}, "--minimum"),
        ({"wire": "int8"}, "--wire"),
    ],
)
def test_options_that_do_not_compose_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        options(**given)
    assert re.search(message, refused.value.message)


def test_what_is_shown_of_a_batch_beside_a_gradient_may_be_left_out(tmp_path: Path) -> None:
    """No number of the forward stands for a fed mask: the hint names the output that alone needs it."""
    b = Builder()
    net = perceptron(b, (3, 5, 2), bias=False)
    b.output("loss", net.loss, ())
    for name, dims in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(0.1))), dims)
    b.output("shown", b.op("Mul", b.input("mask", (3, 5)), net.gradients["w0"]), (3, 5))
    step = api.load(b.save(tmp_path / "step.onnx"), roles=RoleMap(batch=("mask",)))
    with pytest.raises(UnsupportedError, match="the update reads the batch 'mask'") as refused:
        api.split(step, options(servers=1))
    assert refused.value.hints[1:] == ("or leave output 'shown' out of the step",)


def test_an_update_that_reads_a_product_of_weights_which_the_forward_makes_is_refused(tmp_path: Path) -> None:
    """No server has both weights, and the node is in the update of neither."""
    b = Builder()
    net = perceptron(b, (3, 5, 2), bias=False)
    product = b.op("MatMul", "w0", "w1")
    b.output("loss", b.op("Add", net.loss, b.op("ReduceMax", product, keepdims=0)), ())
    rate = b.op("Mul", b.op("ReduceMin", product, keepdims=0), b.const(0.1))
    for name, dims in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], rate)), dims)
    step = api.load(b.save(tmp_path / "step.onnx"))
    for minimum in (1, 10**6):
        with pytest.raises(UnsupportedError, match="which reads 'w0' outside of the update of 'w0'"):
            api.split(step, options(minimum=minimum))


@pytest.mark.parametrize("mode", [Mode.ASYNC, Mode.HALF_ASYNC])
def test_what_needs_rounds_is_named_at_once(mode: Mode, tmp_path: Path) -> None:
    """A target network that the forward reads, and a number of the update that is shown: all causes, all values, and a
    hint that makes the split."""
    model = onnx.load(ROOT / "fixtures/cases/split/target_hard.onnx")
    new = next(each.name for each in model.graph.output if len(each.type.tensor_type.shape.dim) == 2)
    model.graph.node.append(onnx.helper.make_node("ReduceSum", [new], ["size"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("size", 1, ()))
    onnx.save(model, tmp_path / "m.onnx")
    step = api.load(tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError) as caught:
        api.split(step, options(mode=mode))
    assert caught.value.message == (
        f"mode {mode} has no rounds, after which all have the same: trainers read 't0', 't1', which servers update "
        "beside parameters; the update computes output 'size'"
    )
    assert caught.value.hints == ("take --mode sync",)
    api.split(step, options(mode=Mode.SYNC))
