"""Roles come from data flow: on every fixture, with all names scrambled, and on small graphs made to mislead."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gopt.cli.main import main
from helpers import FIXTURES, NAMES, Builder, Network, op_counts, perceptron, scramble, sgd
from onnx import helper
from products import spread

import gopt
from gopt.analysis.roles import RoleMap
from gopt.analysis.training import StateKind, TrainingGraph
from gopt.api import Source
from gopt.errors import GoptError, InputError, OptionError, UnsupportedError
from gopt.passes.pipeline import build_pipeline

SCALARS = {"step", "loss_scale", "good_steps", "micro_step"}


def expected(name: str) -> tuple[str, str | None]:
    """Kind and owner of a fixture's state, told by the name that its generator gave it."""
    stem, _, last = name.rpartition(".")
    if name in SCALARS or last == "step":
        return "scalar", None
    if last.startswith("running_"):
        return "statistic", None
    if last == "grad_acc":
        return "accumulator", stem
    if stem.rpartition(".")[2] in ("weight", "bias"):
        return "optimizer_state", stem
    return "parameter", None


@pytest.fixture(scope="module", params=NAMES)
def fixture(request) -> tuple[str, TrainingGraph]:
    return request.param, gopt.load(FIXTURES / f"{request.param}.onnx").training


def test_states_and_their_owners(fixture):
    _, training = fixture
    assert {s.tensor: (s.kind.value, s.of) for s in training.states} == {
        s.tensor: expected(s.tensor) for s in training.states
    }
    assert all(state.updated == f"{state.tensor}_out" for state in training.states)


def test_inputs_and_outputs(fixture):
    _, training = fixture
    assert training.loss == "loss"
    assert training.batch == ["x", "y"]
    assert training.hyper == ["lr"]
    assert training.metrics == []
    assert {s.tensor for s in training.states} == set(training.graph.inputs) - {"x", "y", "lr"}


def test_every_parameter_has_a_gradient_of_its_own(fixture):
    name, training = fixture
    types = training.graph.types
    assert set(training.gradients) == {state.tensor for state in training.parameters}
    assert len(set(training.gradients.values())) == len(training.gradients)
    narrow = "float16" if "fp16" in name else "bfloat16" if "bf16" in name else "float32"
    for parameter, gradient in training.gradients.items():
        assert types[gradient].shape == types[parameter].shape
        assert types[gradient].dtype in ("float32", narrow)
    if narrow != "float32":
        travelling = Counter(types[gradient].dtype for gradient in training.gradients.values())
        assert travelling[narrow] > 0, "gradients travel before a widening cast"


def test_the_tied_weight_is_one_parameter():
    training = gopt.load(FIXTURES / "gpt_adamw.onnx").training
    users = training.graph.users()["wte.weight"]
    assert {node.op_type for node in users} >= {"Gather", "Transpose"}
    assert not any("head" in state.tensor for state in training.states)


@pytest.mark.parametrize(("name", "seed"), spread(NAMES, [1, 2]))
def test_scrambled_names_give_the_same_roles_and_ranks(name, seed, tmp_path):
    source = onnx.load(FIXTURES / f"{name}.onnx")
    model, table = scramble(source, seed)
    (tmp_path / "q.onnx").write_bytes(model.SerializeToString())
    plain = gopt.load(FIXTURES / f"{name}.onnx")
    other = gopt.load(tmp_path / "q.onnx")
    assert record(other.training) == record(plain.training, table)
    if seed == 1:
        same_ranks(plain, other, table, tmp_path)


def same_ranks(plain: Source, other: Source, table: dict[str, str], folder: Path) -> None:
    """Two sources that differ in names alone give ranks that do; at the default, and with much else."""
    accumulates = any(state.kind is StateKind.ACCUMULATOR for state in plain.training.states)
    ways: list[tuple[dict[str, Any], int]] = [({}, 1), ({"stage": 3, "bucket-mb": 0.001}, 1 if accumulates else 2)]
    ways.append(({"stage": 1, "partition": "whole", "style": "broadcast"}, 1))
    for number, (options, micro_steps) in enumerate(ways):
        folders = [folder / f"{side}{number}" for side in ("plain", "other")]
        for source, target in zip((plain, other), folders):
            pipeline = build_pipeline(defaults={"shard": options})
            gopt.shard(source, 3, accumulate=micro_steps, pipeline=pipeline).write(target)
        assert pieces(folders[1]) == pieces(folders[0], table)
        for path in sorted(folders[0].glob("rank_*.onnx")):
            one, two = (onnx.load(each / path.name, load_external_data=False) for each in folders)
            assert op_counts(one) == op_counts(two)


def record(training: TrainingGraph, table: dict[str, str] | None = None) -> dict[str, Any]:
    """Roles as plain data, in the names of another graph."""

    def name(text: str | None) -> str | None:
        return text if table is None or text is None else table[text]

    return {
        "loss": name(training.loss),
        "batch": [*map(name, training.batch)],
        "hyper": [*map(name, training.hyper)],
        "states": [(name(s.tensor), name(s.updated), s.kind, name(s.of)) for s in training.states],
        "gradients": {name(key): name(value) for key, value in training.gradients.items()},
        "phases": [node.phase.value for node in training.graph.nodes],
    }


def pieces(folder: Path, table: dict[str, str] | None = None) -> list[Any]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return [
        [
            [(piece["tensor"] if table is None else table[piece["tensor"]], piece["start"], piece["stop"])
             for piece in state["pieces"]]
            for state in states
        ]
        for states in [manifest["common"]["state"], *(rank["state"] for rank in manifest["ranks"])]
    ]  # fmt: skip


# --- small graphs ---------------------------------------------------------------------------------------------------


def load(b: Builder, folder: Path, roles: RoleMap = RoleMap()) -> TrainingGraph:
    return gopt.load(b.save(folder / "step.onnx"), roles=roles).training


def step(*widths: int, **options: Any) -> tuple[Builder, Network]:
    b = Builder()
    return b, perceptron(b, widths or (3, 5, 2), **options)


def gradients(net: Network) -> dict[str, str]:
    """The gradients as they were written, by parameter."""
    renamed = net.builder.renamed
    return {name: renamed.get(value, value) for name, value in net.gradients.items()}


def adam(b: Builder, net: Network, name: str) -> None:
    shape, gradient = net.params[name], net.gradients[name]
    first, second = b.small(f"{name}.m", shape), b.small(f"{name}.v", shape)
    new = b.op("Add", b.op("Mul", first, b.const(0.9)), b.op("Mul", gradient, b.const(0.1)))
    square = b.op("Mul", b.op("Mul", gradient, gradient), b.const(0.05))
    spread = b.op("Add", b.op("Mul", second, b.const(0.95)), square)
    way = b.op("Div", new, b.op("Add", b.op("Sqrt", spread), b.const(1e-3)))
    b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", way, b.const(0.01))), shape)
    b.output(f"{name}.m_out", new, shape)
    b.output(f"{name}.v_out", spread, shape)


def test_a_squared_gradient_is_no_gradient(tmp_path):
    """Correction 1: a hand-written Adam has two state-free values, g and g·g."""
    b, net = step()
    b.output("loss", net.loss, ())
    for name in net.params:
        adam(b, net, name)
    training = load(b, tmp_path)
    assert training.gradients == gradients(net)
    owners = {state.tensor: state.of for state in training.states if state.kind is StateKind.OPTIMIZER_STATE}
    assert owners == {f"{name}.{slot}": name for name in net.params for slot in "mv"}


def test_the_value_nearest_the_data(tmp_path):
    """Correction 1: g·|g| is a single candidate too, and the later one."""
    b, net = step(3, 2, bias=False)
    gradient = net.gradients["w0"]
    bent = b.op("Mul", gradient, b.op("Abs", gradient))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", bent, b.const(0.1))), (3, 2))
    assert load(b, tmp_path).gradients == gradients(net)


def test_a_gradient_that_the_backward_reads(tmp_path):
    """Correction 2: BatchNorm's bias gradient feeds the input gradient; its readers there keep the local one."""
    training = gopt.load(FIXTURES / "cnn_sgd.onnx").training
    users = training.graph.users()
    phase = {id(node): node.phase.value for node in training.graph.nodes}
    read = [{phase[id(node)] for node in users.get(gradient, ())} for gradient in training.gradients.values()]
    assert {"backward", "update"} in read
    step = gopt.shard(gopt.load(FIXTURES / "cnn_sgd.onnx"), 2, stage=0).program
    for gradient in training.gradients.values():
        for node in users[gradient]:
            if phase[id(node)] == "backward":
                kept = next(other for other in step.graph.nodes if other.outputs == node.outputs)
                assert gradient in kept.inputs


def test_constants_do_not_taint(tmp_path):
    """Correction 3: a constant in a Where under the gradient is not a batch."""
    b, net = step(3, 2)
    mask = b.const(np.array([[True, False], [True, True], [False, True]]), "bool")
    gradient = b.op("Where", mask, net.gradients["w0"], b.const(np.zeros((3, 2))))
    gate = b.op("Greater", b.const(2.0), b.const(1.0))
    b.output("loss", net.loss, ())
    new = b.op("Sub", "w0", b.op("Mul", gradient, b.const(0.1)))
    b.output("w0_out", b.op("Where", gate, new, "w0"), (3, 2))
    b.output("b0_out", b.op("Sub", "b0", b.op("Mul", net.gradients["b0"], b.const(0.1))), (2,))
    training = load(b, tmp_path)
    assert training.gradients["w0"] in (net.gradients["w0"], gradient)
    assert training.gradients["b0"] == net.gradients["b0"]
    assert {state.kind for state in training.states} == {StateKind.PARAMETER}


def test_a_loss_is_not_the_successor_of_a_scale(tmp_path):
    """Correction 4: loss = scaled / scale looks like the scale's successor."""
    b = Builder()
    scale = b.state("scale", np.float32(8))
    net = perceptron(b, (3, 2), scale=scale)
    scaled = b.op("Mul", net.loss, scale)
    net.loss = b.op("Div", scaled, scale)
    sgd(b, net)
    flags = [b.op("ReduceMax", b.op("Cast", b.op("IsInf", g), to=1), keepdims=0) for g in net.gradients.values()]
    fine = b.op("Equal", b.op("Sum", *flags), b.const(0.0))
    new = b.op("Where", fine, b.op("Mul", scale, b.const(2.0)), b.op("Mul", scale, b.const(0.5)))
    b.output("scale_out", new, ())
    training = load(b, tmp_path)
    assert training.loss == "loss"
    kinds = {state.tensor: (state.updated, state.kind) for state in training.states}
    assert kinds["scale"] == ("scale_out", StateKind.SCALAR)
    assert set(training.gradients) == {"w0", "b0"}


def test_a_frozen_parameter_with_an_output(tmp_path):
    b, net = step()
    sgd(b, net, skip=["w0"])
    b.output("w0_out", b.op("Identity", "w0"), net.params["w0"])
    training = load(b, tmp_path)
    assert "w0" not in training.gradients
    assert training.state_of()["w0"].kind is StateKind.PARAMETER


def test_an_averaged_copy_belongs_to_its_parameter(tmp_path):
    b, net = step(3, 2, bias=False)
    b.output("loss", net.loss, ())
    new = b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1)))
    copy = b.parameter("copy", (3, 2))
    b.output("w0_out", new, (3, 2))
    b.output("copy_out", b.op("Add", b.op("Mul", copy, b.const(0.9)), b.op("Mul", new, b.const(0.1))), (3, 2))
    training = load(b, tmp_path)
    assert {s.tensor: (s.kind, s.of) for s in training.states} == {
        "w0": (StateKind.PARAMETER, None), "copy": (StateKind.OPTIMIZER_STATE, "w0"),
    }  # fmt: skip


def test_states_that_are_initializers_alone(tmp_path):
    b, net = step()
    sgd(b, net)
    b.inputs = [value for value in b.inputs if value.name in ("x", "y")]
    training = load(b, tmp_path)
    assert {state.tensor for state in training.states} == net.params.keys()
    assert training.gradients == gradients(net)


# --- the user's own map ---------------------------------------------------------------------------------------------


def two_alike(tmp_path: Path) -> tuple[Builder, Network, list[str]]:
    """Two states and two outputs, each output as near to the one as to the other."""
    b, net = step(3, 2, bias=False)
    b.output("loss", net.loss, ())
    one, two = b.small("one", (3, 2)), b.small("two", (3, 2))
    first = b.op("Add", b.op("Add", one, two), net.gradients["w0"])
    second = b.op("Sub", b.op("Add", one, two), net.gradients["w0"])
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1))), (3, 2))
    b.output("first", first, (3, 2))
    b.output("second", second, (3, 2))
    return b, net, ["one", "two"]


def test_ambiguity_is_refused_with_a_name_and_an_option(tmp_path, capsys):
    b, _, _ = two_alike(tmp_path)
    path = b.save(tmp_path / "step.onnx")
    assert main(["shard", str(path), "--ranks", "2", "--dry-run"]) == 4
    text = capsys.readouterr().err
    assert "'first'" in text and "--states" in text


@pytest.mark.parametrize("pairs", [{"one": "first", "two": "second"}, {"one": "second", "two": "first"}])
def test_the_map_settles_pairs(tmp_path, pairs):
    b, _, _ = two_alike(tmp_path)
    training = load(b, tmp_path, RoleMap(states=pairs))
    assert {s.tensor: s.updated for s in training.states} == {"w0": "w0_out", **pairs}


def test_the_map_names_the_gradient(tmp_path):
    b, net = step(3, 2, bias=False)
    doubled = b.op("Mul", net.gradients["w0"], b.const(2.0))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", doubled, b.const(0.1))), (3, 2))
    assert load(b, tmp_path, RoleMap(params={"w0": doubled})).gradients == {"w0": doubled}


def test_the_map_names_a_batch(tmp_path):
    """A scalar that differs from rank to rank is not a hyper-parameter."""
    b, net = step(3, 2, bias=False)
    weight = b.input("importance", ())
    net.loss = b.op("Mul", net.loss, weight)
    net.gradients["w0"] = b.op("Mul", net.gradients["w0"], weight)
    sgd(b, net)
    assert load(b, tmp_path).batch == ["x", "y"]
    assert load(b, tmp_path, RoleMap(batch=["importance"])).batch == ["x", "y", "importance"]


@pytest.mark.parametrize("stored", [True, False])
def test_a_state_is_no_batch(stored, tmp_path):
    b, net = step(3, 2)
    sgd(b, net)
    if not stored:
        b.stored = [each for each in b.stored if each.name != "w0"]
    with pytest.raises(OptionError, match="'w0' is given as a batch, but it is a state: output 'w0_out' replaces it"):
        load(b, tmp_path, RoleMap(batch=["w0"]))
    with pytest.raises(OptionError, match="'w0' is given as a batch and as a state"):
        load(b, tmp_path, RoleMap(states={"w0": "w0_out"}, batch=["w0"]))


def test_the_map_reaches_the_command_line_and_the_configuration(tmp_path, capsys):
    b, net = step(3, 2, bias=False)
    b.output("metric", b.op("ReduceL1", "w0", keepdims=0), ())
    second = b.op("Mul", net.loss, b.const(3.0))
    sgd(b, net)
    b.output("other", second, ())
    path = b.save(tmp_path / "step.onnx")
    (tmp_path / "gopt.toml").write_text('[roles]\nloss = ["other"]\n')
    table = ["--config", str(tmp_path / "gopt.toml")]
    for given, loss in (([], "loss"), (["--loss", "other"], "other"), (table, "other"), (["--loss", "loss"], "loss")):
        assert main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "out"), "--force", *given]) == 0
        assert json.loads((tmp_path / "out" / "manifest.json").read_text())["loss"] == loss
    capsys.readouterr()


@pytest.mark.parametrize(
    "roles", [RoleMap(loss="nix"), RoleMap(states={"nix": "loss"}), RoleMap(params={"nix": ""}), RoleMap(batch=["nix"])]
)
def test_a_map_with_an_unknown_name_is_refused(tmp_path, roles):
    b, net = step()
    sgd(b, net)
    with pytest.raises(OptionError, match="'nix'"):
        load(b, tmp_path, roles)


@pytest.mark.parametrize("gradient", ["nix", "loss", "w0_out"], ids=["unknown", "another shape", "behind the update"])
def test_a_map_with_a_gradient_that_cannot_be_is_refused(tmp_path, gradient):
    b, net = step(3, 2, bias=False)
    sgd(b, net)
    with pytest.raises((OptionError, UnsupportedError), match=f"{gradient}|w0"):
        gopt.shard(gopt.load(b.save(tmp_path / "step.onnx"), roles=RoleMap(params={"w0": gradient})), 2)


def test_a_map_with_a_parameter_that_is_no_state_is_refused(tmp_path):
    b, net = step(3, 2, bias=False)
    sgd(b, net)
    with pytest.raises(OptionError, match="'x'"):
        load(b, tmp_path, RoleMap(params={"x": ""}))


# --- refusals -------------------------------------------------------------------------------------------------------


def refused(b: Builder, folder: Path, kind: type[GoptError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        gopt.shard(gopt.load(b.save(folder / "step.onnx")), 2)
    text = " ".join([caught.value.message, *caught.value.hints])
    assert "\n" not in caught.value.message
    for word in words:
        assert word in text, text


def test_no_loss(tmp_path):
    b, net = step()
    sgd(b, net)
    b.outputs = [value for value in b.outputs if value.name != "loss"]
    refused(b, tmp_path, InputError, "no loss", "make the loss an output of the step")


def test_no_state(tmp_path):
    b, net = step()
    b.output("loss", net.loss, ())
    refused(b, tmp_path, InputError, "no output replaces an input")


def test_no_training_step_at_all(tmp_path):
    b, _ = step()
    b.output("y_out", b.op("Relu", b.op("MatMul", "x", "w0")), (4, 5))
    refused(b, tmp_path, InputError, "not a training step")


def test_only_frozen_parameters(tmp_path):
    b, net = step()
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Mul", "w0", b.const(0.5)), (3, 5))
    refused(b, tmp_path, InputError, "no parameter")


def test_a_loss_that_is_shown_with_a_penalty(tmp_path):
    b, net = step()
    sgd(b, net)
    b.output("other", b.op("Add", net.loss, b.op("ReduceMean", b.op("Abs", "w0"), keepdims=0)), ())
    training = load(b, tmp_path)
    assert training.losses == ("other",) and training.metrics == ["loss"] and set(training.gradients) >= {"w0", "w1"}


def test_a_metric_nearer_to_the_data_than_the_loss(tmp_path):
    """It was taken for the loss, and no gradient was found."""
    b, net = step()
    sgd(b, net)
    b.output("near", b.op("ReduceSum", b.op("MatMul", "x", "w0"), keepdims=0), ())
    training = load(b, tmp_path)
    assert training.losses == ("loss",) and training.metrics == ["near"] and set(training.gradients) >= {"w0", "w1"}


def branch(b: Builder, flag: str, one: str, other: str, shape: tuple[int, ...]) -> str:
    def body(name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}.branch", 1, shape)
        return helper.make_graph([helper.make_node("EyeLike", [name], [out.name])], "body", [], [out])

    return b.op("If", flag, then_branch=body(one), else_branch=body(other))


def test_control_flow_in_an_update(tmp_path):
    b, net = step(3, 2, bias=False)
    b.output("loss", net.loss, ())
    new = b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1)))
    flag = b.op("Greater", b.input("lr", ()), b.const(0.5))
    b.output("w0_out", branch(b, flag, new, "w0", (3, 2)), (3, 2))
    path = b.save(tmp_path / "step.onnx")
    roles = RoleMap(states={"w0": "w0_out"})
    with pytest.raises(UnsupportedError, match="control flow"):
        gopt.shard(gopt.load(path, roles=roles), 2)


def test_control_flow_without_a_map_is_refused_too(tmp_path):
    b, net = step(3, 2)
    b.output("loss", net.loss, ())
    b.output("b0_out", b.op("Sub", "b0", b.op("Mul", net.gradients["b0"], b.const(0.1))), (2,))
    new = b.op("Sub", "w0", b.op("Mul", net.gradients["w0"], b.const(0.1)))
    flag = b.op("Greater", b.input("lr", ()), b.const(0.5))
    b.output("w0_out", branch(b, flag, new, "w0", (3, 2)), (3, 2))
    with pytest.raises(UnsupportedError, match=r"w0_out|control flow"):
        gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2)


def test_an_unknown_operator_in_an_update(tmp_path):
    b, net = step(3, 2, bias=False)
    b.extra_domains.append("vendor.ops")
    b.output("loss", net.loss, ())
    way = b.op("FancyStep", net.gradients["w0"], domain="vendor.ops")
    b.output(
        "w0_out", b.op("Sub", "w0", b.op("Mul", b.op("Reshape", way, b.const([3, 2], "int64")), b.const(0.1))), (3, 2)
    )
    refused(b, tmp_path, UnsupportedError, "vendor.ops")


def test_a_dynamic_parameter(tmp_path):
    b, net = step(3, 2, bias=False)
    sgd(b, net)
    for value in (*b.inputs, *b.outputs):
        if value.name.startswith("w0"):
            value.type.tensor_type.shape.dim[0].dim_param = "N"
        elif value.name == "x":
            value.type.tensor_type.shape.dim[1].dim_param = "N"
    b.stored = [tensor for tensor in b.stored if tensor.name != "w0"]
    refused(b, tmp_path, UnsupportedError, "'w0'", "dynamic")


def test_a_count_of_events_is_added_up_over_ranks(tmp_path):
    """A running count of the batch's positive labels: each rank counts its own."""
    b, net = step()
    sgd(b, net)
    seen = b.state("seen", np.int64(0))
    positive = b.op("ReduceSum", b.op("Cast", b.op("Greater", "y", b.const(0.0)), to=7), keepdims=0)
    b.output("seen_out", b.op("Add", seen, positive), (), "int64")
    made = gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 2)
    assert [(each.tensor, each.rule) for each in made.program.reductions.values()] == [("seen", "sum")]


def test_an_update_that_reads_the_loss_beside_a_gradient(tmp_path):
    """A Polyak step: the step's length is the loss over the gradient's squared norm."""
    b, net = step(3, 2, bias=False)
    gradient = net.gradients["w0"]
    length = b.op("Div", net.loss, b.op("ReduceSumSquare", gradient, keepdims=0))
    b.output("loss", net.loss, ())
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", gradient, length)), (3, 2))
    refused(b, tmp_path, UnsupportedError, "loss")
    assert main(["shard", str(tmp_path / "step.onnx"), "--ranks", "2", "--dry-run"]) == 4


def test_random_nodes_are_noted_and_not_verified(tmp_path, capsys):
    b = Builder()
    net = perceptron(b, (3, 2), bias=False)
    b.output("loss", net.loss, ())
    dropped = b.op("Bernoulli", b.const(np.full((3, 2), 0.5)))
    kept = b.op("Mul", net.gradients["w0"], dropped)
    b.output("w0_out", b.op("Sub", "w0", b.op("Mul", kept, b.const(0.1))), (3, 2))
    path = b.save(tmp_path / "step.onnx")
    code = main(["shard", str(path), "--ranks", "2", "-o", str(tmp_path / "out")])
    said = capsys.readouterr()
    if code == 0:
        assert "random" in said.out
        assert main(["verify", str(tmp_path / "out")]) == 4
        assert "random" in capsys.readouterr().err
    else:
        assert code == 4


def test_one_element_parameters_alone_are_reduced_before_the_clip(tmp_path):
    """Each clip coefficient is made of its own gradient too: that one is nearer the data."""
    b = Builder()
    net = perceptron(b, (1, 1, 1), batch=2)
    squares = [b.op("ReduceSumSquare", gradient, keepdims=0) for gradient in net.gradients.values()]
    norm = b.op("Sqrt", b.op("Sum", *squares))
    factor = b.op("Min", b.const(1.0), b.op("Div", b.const(0.1), norm))
    before = dict(net.gradients)
    net.gradients = {name: b.op("Mul", gradient, factor) for name, gradient in before.items()}
    sgd(b, net)
    assert load(b, tmp_path).gradients == before


def test_a_named_state_that_follows_the_batch_is_refused_as_an_unnamed_one(tmp_path):
    """Ranks may not average a parameter behind an update that is not linear."""
    b, net = step(3, 2, bias=False)
    delta = next(node.input[1] for node in b.nodes if net.gradients["w0"] in node.output)
    turned = b.op("MatMul", b.op("Transpose", delta, perm=[1, 0]), "x")
    b.output("loss", net.loss, ())
    b.output(
        "w0_out", b.op("Transpose", b.op("Sub", b.op("Transpose", "w0", perm=[1, 0]), b.op("Sign", turned))), (3, 2)
    )
    pairs = {"w0": "w0_out"}
    with pytest.raises(UnsupportedError, match="'w0'") as caught:
        load(b, tmp_path, RoleMap(states=pairs))
    assert "--params w0=" in caught.value.hints[0]


def test_two_states_cannot_have_one_new_value(tmp_path, capsys):
    b, _, _ = two_alike(tmp_path)
    path = str(b.save(tmp_path / "step.onnx"))
    for given in (["one=first", "two=first"], ["one=first", "one=second"]):
        options = [text for pair in given for text in ("--states", pair)]
        assert main(["shard", path, "--ranks", "2", "--dry-run", *options]) == 2
        assert "'one'" in capsys.readouterr().err


@pytest.mark.parametrize("kept", [True, False])
def test_a_state_that_keeps_a_gradient_may_be_named_as_that_gradient(tmp_path, kept):
    """What gopt finds by itself it takes back from a manifest; a moment is still no gradient."""
    b, net = step(3, 2, bias=False)
    old = b.state("g", np.zeros((3, 2), np.float32))
    value = net.gradients["w0"] if kept else b.op("Add", b.op("Mul", old, b.const(0.9)), net.gradients["w0"])
    b.output("loss", net.loss, ())
    b.output("g_out", value, (3, 2))
    b.output("w0_out", b.op("Sub", "w0", b.op("Sub", value, b.op("Mul", old, b.const(0.5)))), (3, 2))
    roles = RoleMap(states={"w0": "w0_out", "g": "g_out"}, params={"w0": "g_out"})
    if kept:
        assert load(b, tmp_path, roles).gradients == {"w0": "g_out"}
    else:
        with pytest.raises(OptionError, match="part of the update"):
            load(b, tmp_path, roles)


COPIES = """<ir_version: 10, opset_import: ["" : 20]>
step (float16[4,3] x, float16[4,3] y, float16[3,3] p, float16[3,3] q, float[3,3] mp, float[3,3] mq)
  => (float16 loss, float16[3,3] p_out, float16[3,3] q_out, float[3,3] mp_out, float[3,3] mq_out)
<float third = {0.3}, float lr = {0.1}>
{
  k = Cast <to = 10> (third)
  h = MatMul(x, p)
  o = MatMul(h, q)
  d = Sub(o, y)
  s = Mul(d, d)
  loss = ReduceMean <keepdims = 0> (s)
  e = Mul(d, k)
  gq = Gemm <transA = 1> (h, e)
  f = Gemm <transB = 1> (e, q)
  gp = Gemm <transA = 1> (x, f)
  wp = Cast <to = 1> (gp)
  wq = Cast <to = 1> (gq)
  rp = Mul(wp, lr)
  rq = Mul(wq, lr)
  mp_out = Sub(mp, rp)
  mq_out = Sub(mq, rq)
  p_out = Cast <to = 10> (mp_out)
  q_out = Cast <to = 10> (mq_out)
}"""
"""Two low-precision parameters of one type beside their masters: the data flow does not say which is whose copy."""


def with_copies(folder: Path, **stored: np.ndarray) -> Path:
    model = onnx.parser.parse_model(COPIES)
    for name, value in stored.items():
        dtype = np.float32 if name.startswith("m") else np.float16
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(dtype), name))
    onnx.save(model, folder / "step.onnx")
    return folder / "step.onnx"


def test_low_precision_parameters_are_told_apart_by_their_masters_values(tmp_path):
    one, other = np.arange(9.0).reshape(3, 3) / 7, np.arange(9.0).reshape(3, 3) / 11
    training = gopt.load(with_copies(tmp_path, p=one, q=other, mp=one, mq=other)).training
    assert {state.tensor: state.updated for state in training.states} == {
        name: f"{name}_out" for name in ("p", "q", "mp", "mq")
    }


@pytest.mark.parametrize("known", ["equal", "copies alone", "none"])
def test_low_precision_parameters_of_equal_values_are_refused(known, tmp_path):
    """To guess would exchange two layers from the second step on."""
    value = np.ones((3, 3))
    stored = {"equal": "p q mp mq", "copies alone": "p q", "none": ""}[known].split()
    path = with_copies(tmp_path, **dict.fromkeys(stored, value))
    with pytest.raises(UnsupportedError, match=r"output '\w_out' may replace any of 'p', 'q'") as caught:
        gopt.load(path)
    assert caught.value.hints[0].startswith("name the pair: --states ")
    roles = RoleMap(states={"p": "p_out", "q": "q_out"})
    assert {state.tensor for state in gopt.load(path, roles=roles).training.parameters} >= {"p", "q"}


def test_functions_of_the_loss_alone_are_metrics(tmp_path):
    step = onnx.load(FIXTURES / "mlp_sgd.onnx")
    for number in range(30):
        step.graph.node.append(helper.make_node("Neg", ["loss"], [f"shown{number}"]))
        step.graph.output.append(helper.make_tensor_value_info(f"shown{number}", onnx.TensorProto.FLOAT, []))
    onnx.save(step, tmp_path / "m.onnx")
    training = gopt.load(tmp_path / "m.onnx").training
    assert training.losses == ("loss",) and len(training.metrics) == 30
