"""Derived steps against PyTorch's numbers: recorded ones everywhere, and PyTorch itself where it is installed."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from derive_cases import CASES, COMBINATIONS, MODELS, RECORDED, DerivedRun, derived_run, forward_model
from gopt.cli.main import main
from helpers import FIXTURES
from onnx import TensorProto, helper, numpy_helper
from products import part

import gopt
from gopt.errors import InputError, OptionError, UnsupportedError
from gopt.frontends.derive import derive as front_end
from gopt.frontends.derive.derive import derive
from gopt.frontends.derive.optimizers import OPTIMIZERS, Decay
from gopt.frontends.derive.options import DeriveOptions, Norms
from gopt.frontends.derive.schedules import SCHEDULES

NEAR = {"rtol": 2e-5, "atol": 2e-6}


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    onnx.save(forward_model(), tmp_path / "mlp.onnx")
    return tmp_path / "mlp.onnx"


def command(*arguments: object) -> int:
    return main([str(each) for each in arguments])


ALL_CASES = {**CASES, **COMBINATIONS}


@pytest.mark.parametrize("name", [*part(CASES, len(CASES) // 2), *part(COMBINATIONS, 8)])
def test_five_steps_are_pytorchs(tmp_path: Path, name: str):
    recorded = np.load(RECORDED / "optimizers.npz")
    run, losses = derived_run(ALL_CASES[name], tmp_path)
    np.testing.assert_allclose(losses, recorded[f"{name}/losses"], **NEAR)
    for parameter in ("w1", "b1", "w2", "b2"):
        np.testing.assert_allclose(run.states[parameter], recorded[f"{name}/{parameter}"], **NEAR, err_msg=parameter)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inspect_names_what_derive_wrote(tmp_path: Path, mlp: Path, name: str, seed: int):
    """The optimizer, its options and the weight decay, drawn at random, are read back from the graph alone."""
    drawn, record = random.Random(f"{name} {seed}"), OPTIMIZERS[name]
    ranges = {"eps": (1e-8, 1e-4), "momentum_decay": (1e-3, 1e-2)}
    options = {key: float(f"{drawn.uniform(*ranges.get(key, (0.8, 0.99))):.3g}") for key in record.options}
    decay = drawn.choice([0.0, 0.02])
    settings = {"loss": "cross-entropy", "optimizer": name, "optimizer_options": options, "weight_decay": decay}
    derive(mlp, tmp_path / "s.onnx", DeriveOptions(**settings))
    found = gopt.inspect(gopt.load(tmp_path / "s.onnx"))
    (optimizer,) = found.optimizers
    names = {"sgd": "SGD", "nesterov": "momentum", "momentum": "momentum"}
    assert optimizer.name.lower() == names.get(name, "adam" if name == "adamw" and not decay else name).lower()
    expected = options | {"weight_decay": decay} | ({"nesterov": name == "nesterov"} if "momentum" in options else {})
    assert {key: optimizer.hyper[key] for key in expected} == expected
    assert not decay or name == "sgd" or optimizer.hyper["decoupled"] == (record.decay is Decay.DECOUPLED)


def test_an_overflow_halves_a_dynamic_scale_and_keeps_the_rest(tmp_path: Path):
    run, _ = derived_run(CASES["dynamic_scale"], tmp_path)
    assert run.states["loss_scale"] == 32768
    assert run.states["loss_scale.growth_tracker"] == 2
    assert run.states["step"] == 4  # of five: the third one overflowed


def test_every_optimizer_and_knob_is_compared():
    """A new optimizer, schedule, knob or way to scale is compared with PyTorch too."""
    given = [case.options for case in ALL_CASES.values()]
    for name, rule in OPTIMIZERS.items():
        knobs = [each for each in given if each["optimizer"] == name]
        assert {key for each in knobs for key in each.get("optimizer_options", {})} == set(rule.options), name
        assert {0.0, 0.2} <= {each.get("weight_decay") for each in knobs}, name
    assert {each.get("schedule") for each in given} == {None, *SCHEDULES}
    for name, schedule in SCHEDULES.items():
        used = {key for each in given if each.get("schedule") == name for key in each["schedule_options"]}
        assert used == set(schedule.options), name


def test_a_dynamic_scale_doubles_after_2000_steps_without_overflow(tmp_path: Path):
    """As torch.amp.GradScaler with its usual growth_interval."""
    onnx.save(forward_model(), tmp_path / "m.onnx")
    options = DeriveOptions(loss="mse", optimizer="sgd", loss_scale="dynamic")
    derive(tmp_path / "m.onnx", tmp_path / "step.onnx", options)
    run, batch = DerivedRun(tmp_path / "step.onnx"), {"x": np.ones((6, 4), np.float32)}
    for tracker, scale, counted in ((1998, 65536, 1999), (1999, 131072, 0)):
        run.states["loss_scale.growth_tracker"] = np.array(tracker, np.float32)
        run.step(**batch, target=np.zeros((6, 3), np.float32), lr=np.array(0.01, np.float32))
        assert run.states["loss_scale"] == scale and run.states["loss_scale.growth_tracker"] == counted


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_pytorchs(tmp_path: Path, name: str):
    """With a rate of one the step of SGD is the gradient."""
    recorded = np.load(RECORDED / f"{name}.npz")
    options = DeriveOptions(
        loss="cross-entropy", optimizer="sgd", lr=1.0, class_axis=-1 if name == "gpt" else None,
        batchnorm=Norms.TRAIN if name == "batchnorm" else Norms.KEEP,
    )  # fmt: skip
    derived = derive(RECORDED / f"{name}.onnx", tmp_path / "step.onnx", options)
    run = DerivedRun(tmp_path / "step.onnx")
    before = dict(run.states)
    assert run.step(x=recorded["x"], label=recorded["label"]) == pytest.approx(float(recorded["loss"]), rel=1e-5)
    after = {key.removeprefix("after."): recorded[key] for key in recorded if key.startswith("after.")}
    for key, value in after.items():
        np.testing.assert_allclose(run.states[key], value, rtol=1e-5, atol=1e-6, err_msg=key)
    expected = sorted(_sized(recorded[key]) for key in recorded if key.startswith("grad."))
    found = sorted(_sized(before[key] - run.states[key]) for key in before if key not in after)
    if name == "lstm":  # onnx packs two biases into one value, and orders gates otherwise
        expected = _packed(recorded)
    assert len(found) == len(expected) == derived.parameters
    for (shape, size), (torch_shape, torch_size) in zip(found, expected):
        assert shape == torch_shape
        assert size == pytest.approx(torch_size, rel=2e-4, abs=1e-6)


def _sized(gradient: np.ndarray) -> tuple[tuple[int, ...], float]:
    """A gradient by its sorted dimensions and its norm: exporters transpose weights and rename them."""
    return tuple(sorted(each for each in gradient.shape if each > 1)), float(np.linalg.norm(gradient))


def _packed(recorded: np.lib.npyio.NpzFile) -> list[tuple[tuple[int, ...], float]]:
    names = [key for key in recorded if key.startswith("grad.")]
    biases = np.concatenate([recorded[key] for key in names if "bias_" in key])
    return sorted([_sized(recorded[key]) for key in names if "bias_" not in key] + [_sized(biases)])


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_a_step_shards_and_verifies(mlp: Path, tmp_path: Path, optimizer: str):
    step, ranks = tmp_path / "step.onnx", tmp_path / "ranks"
    options = DeriveOptions(loss="cross-entropy", optimizer=optimizer, clip_norm=1.0)
    gopt.derive(mlp, step, options)
    gopt.shard(step, 2).write(ranks)
    assert gopt.verify(ranks).equal


def test_what_a_step_has(mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    step = tmp_path / "step.onnx"
    assert command("derive", mlp, "--loss", "cross-entropy", "--optimizer", "adam", "-o", step, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "gopt-derived/1"
    assert (record["parameters"], record["states"], record["confirmed"]) == (4, 13, 4)
    assert record["inputs"] == ["x", "label", "lr"]
    source = gopt.load(step)
    assert source.training.gradients == {name: f"{name}.grad" for name in ("w1", "b1", "w2", "b2")}
    assert source.training.batch == ["x", "label"]
    assert source.training.metrics == ["logits"]
    stored = numpy_helper.to_array(forward_model().graph.initializer[0])
    assert np.array_equal(source.training.graph.initializers["w1"].numpy(), stored)
    assert command("derive", mlp, "--loss", "mse", "--optimizer", "sgd", "-o", step) == 2
    assert "exists already" in capsys.readouterr().err
    assert command("derive", mlp, "--loss", "mse", "--optimizer", "sgd", "--lr", "0.1", "-o", step, "--force") == 0
    assert "inputs: x, target\n" in capsys.readouterr().out


def test_a_backward_has_no_axis_of_directions(mlp: Path, tmp_path: Path):
    """The parameters' updates are as large as in a step that a framework exports."""
    derived = derive(mlp, tmp_path / "step.onnx", DeriveOptions(loss="cross-entropy", optimizer="sgd"))
    assert derived.nodes == 37
    graph = gopt.load(tmp_path / "step.onnx").training.graph
    products = [node for node in graph.nodes if node.is_a("MatMul")]
    assert products and all(len(graph.types[node.outputs[0]].dims) == 2 for node in products)


def test_wrong_gradients_are_not_written(mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A backward that forgets the slope of tanh."""
    true = front_end.write_step

    def planted(*given: object):
        step = true(*given)
        product = next(each for each in step.graph.nodes if "w1.grad" in each.outputs)
        slope = next(each for each in step.graph.nodes if product.inputs[1] in each.outputs)
        assert (product.op_type, slope.op_type) == ("MatMul", "Mul")
        product.inputs[1] = next(name for name in slope.inputs if "matmul" in name)
        return step

    monkeypatch.setattr(front_end, "write_step", planted)
    with pytest.raises(UnsupportedError, match="'w1' is not confirmed"):
        derive(mlp, tmp_path / "step.onnx", DeriveOptions(loss="cross-entropy", optimizer="sgd"))
    assert not (tmp_path / "step.onnx").exists()


def test_gradients_of_another_size_are_not_written(mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Twice the gradient is proportional to the loss, and wrong."""
    true = front_end.write_step

    def planted(*given: object):
        step = true(*given)
        tensor = next(each for name, each in step.graph.initializers.items() if name.startswith("div"))
        tensor.array = 2 * tensor.numpy()
        return step

    monkeypatch.setattr(front_end, "write_step", planted)
    with pytest.raises(UnsupportedError, match="is not confirmed"):
        derive(mlp, tmp_path / "step.onnx", DeriveOptions(loss="cross-entropy", optimizer="sgd"))


def test_parameters_are_chosen(mlp: Path, tmp_path: Path):
    options = DeriveOptions(loss="cross-entropy", optimizer="sgd", freeze=("*1",))
    derive(mlp, tmp_path / "step.onnx", options)
    training = gopt.load(tmp_path / "step.onnx").training
    assert list(training.gradients) == ["w2", "b2"]
    assert "w1" in training.graph.initializers and "w1" not in training.graph.inputs
    options = DeriveOptions(loss="cross-entropy", optimizer="sgd", trainable=("w1",))
    assert derive(mlp, tmp_path / "one.onnx", options).parameters == 1


def test_open_dimensions_are_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = forward_model()
    for each in (model.graph.input[0], model.graph.output[0]):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, tmp_path / "open.onnx")
    wanted = ("derive", tmp_path / "open.onnx", "--loss", "mse", "--optimizer", "sgd", "-o", tmp_path / "step.onnx")
    assert command(*wanted) == 2
    assert "--dim batch=16" in capsys.readouterr().err
    assert command(*wanted, "--dim", "batch=7") == 0
    assert gopt.load(tmp_path / "step.onnx").training.graph.inputs["x"].shape == (7, 4)
    assert command(*wanted, "--dim", "batch=7", "--dim", "odd=3", "--force") == 2
    assert "--dim 'odd'" in capsys.readouterr().err


def test_an_own_loss_tied_weights_and_literals(tmp_path: Path):
    """A scalar output of the model; a weight that is read twice; a weight that a Constant node holds."""
    weight = np.arange(9, dtype=np.float32).reshape(3, 3) / 10 - 0.3
    literal = np.array([0.5, -1.0, 2.0], np.float32)
    nodes = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(literal, "c")),
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["d"]),
        helper.make_node("Mul", ["d", "c"], ["e"]),
        helper.make_node("Mul", ["e", "e"], ["f"]),
        helper.make_node("ReduceMean", ["f"], ["cost"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes, "tied", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3])],
        [helper.make_tensor_value_info("cost", TensorProto.FLOAT, []),
         helper.make_tensor_value_info("b", TensorProto.FLOAT, [4, 3])],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx")
    derived = derive(tmp_path / "m.onnx", tmp_path / "s.onnx", DeriveOptions(loss="cost", optimizer="sgd", lr=1.0))
    assert (derived.parameters, derived.inputs) == (2, ("x",))
    x = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    session = onnx.reference.ReferenceEvaluator(onnx.load(tmp_path / "s.onnx"))
    outputs = dict(
        zip([each.name for each in session.proto_.graph.output], session.run(None, {"x": x, "w": weight, "c": literal}))
    )
    b = np.tanh(x @ weight)
    into_f = 2 * (b @ weight * literal) / 12
    into_d = into_f * literal
    tied = x.T @ ((into_d @ weight.T) * (1 - b * b)) + b.T @ into_d
    np.testing.assert_allclose(weight - outputs["w_out"], tied, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(literal - outputs["c_out"], (into_f * (b @ weight)).sum(0), rtol=1e-4, atol=1e-6)


def test_dropout_trains_by_draws(tmp_path: Path):
    model = forward_model()
    model.graph.node[2].input[0] = "dropped"
    model.graph.node.insert(2, helper.make_node("Dropout", ["t", "ratio"], ["dropped"]))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.25, np.float32), "ratio"))
    onnx.save(model, tmp_path / "m.onnx")
    kept = derive(tmp_path / "m.onnx", tmp_path / "kept.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    assert any("nothing is dropped" in note for note in kept.notes)
    options = DeriveOptions(loss="mse", optimizer="sgd", dropout=Norms.TRAIN, lr=1e-3)
    derived = derive(tmp_path / "m.onnx", tmp_path / "step.onnx", options)
    assert derived.inputs == ("x", "target", "draw_0")
    run, random = DerivedRun(tmp_path / "step.onnx"), np.random.default_rng(2)
    x, target = random.standard_normal((6, 4)).astype(np.float32), np.zeros((6, 3), np.float32)
    draw = random.random((6, 5)).astype(np.float32)
    w1, b1, w2, b2 = (run.states[name] for name in ("w1", "b1", "w2", "b2"))
    expected = np.mean(((np.tanh(x @ w1 + b1) * (draw >= 0.25) / 0.75) @ w2 + b2) ** 2)
    assert run.step(x=x, target=target, draw_0=draw) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"optimizer": "adamv"}, "--optimizer 'adamv' is unknown", "did you mean"),
        (
            {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
            "--optimizer sgd has no --momentum",
            "leave --momentum out, or take --optimizer momentum",
        ),
        ({"optimizer": "momentum", "optimizer_options": {"beta1": 0.9}}, "has no --betas", "it has --momentum"),
        ({"optimizer": "adam", "optimizer_options": {"beta2": 1.0}}, "--betas cannot be 1", "below 1"),
        ({"optimizer": "sgd", "schedule": "cosine"}, "--schedule cosine needs --total-steps", "give"),
        (
            {"optimizer": "sgd", "schedule_options": {"gamma": 0.1}},
            "a step without --schedule has no --gamma",
            "or take --schedule step",
        ),
        ({"optimizer": "sgd", "schedule": "stepp"}, "--schedule 'stepp' is unknown", "did you mean"),
        ({"optimizer": "sgd", "clip_norm": 1.0, "clip_value": 1.0}, "cannot be combined with --clip-value", "take one"),
        ({"optimizer": "sgd", "loss_scale": -1.0}, "--loss-scale cannot be -1.0", "dynamic"),
        ({"optimizer": "sgd", "lr": 0.0}, "--lr cannot be 0.0", "above 0"),
        ({"optimizer": "sgd", "weight_decay": -0.1}, "--weight-decay cannot be -0.1", "0 or"),
    ],
)
def test_knobs_that_an_optimizer_lacks_are_refused(given: dict[str, object], message: str, hint: str):
    with pytest.raises(OptionError) as caught:
        DeriveOptions(loss="mse", **given)
    assert message in caught.value.message
    assert hint in " ".join(caught.value.hints)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "mes"}, "--loss 'mes' is neither a loss nor an output"),
        ({"loss": "logits"}, "no floating scalar"),
        ({"loss": "mse", "prediction": "logit"}, "--prediction 'logit' is not a floating output"),
        ({"loss": "mse", "class_axis": 1}, "mse has no --class-axis"),
        ({"loss": "mse", "freeze": ("*",)}, "nothing is left to train"),
        ({"loss": "mse", "trainable": ("w9",)}, "--trainable 'w9' matches no floating constant"),
        ({"loss": "mse", "dims": {"n": 3}}, "--dim 'n': no input has this open dimension"),
    ],
)
def test_requests_that_make_no_step_are_refused(mlp: Path, tmp_path: Path, given: dict[str, object], message: str):
    with pytest.raises(OptionError) as caught:
        derive(mlp, tmp_path / "step.onnx", DeriveOptions(**{"optimizer": "sgd", **given}))
    assert message in caught.value.message
    assert caught.value.hints


def test_a_refusal_ends_with_exit_code_4(mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Det between a weight and the loss; beside it, it passes."""
    model = onnx.load(mlp)
    square = numpy_helper.from_array(np.eye(3, dtype=np.float32), "square")
    model.graph.initializer.append(square)
    model.graph.node.extend(
        [helper.make_node("Det", ["square"], ["det"]), helper.make_node("Mul", ["logits", "det"], ["all"])]
    )
    model.graph.output.append(helper.make_tensor_value_info("all", TensorProto.FLOAT, [6, 3]))
    onnx.save(model, tmp_path / "det.onnx")
    wanted = ("derive", tmp_path / "det.onnx", "--loss", "mse", "--optimizer", "sgd", "-o", tmp_path / "step.onnx")
    assert command(*wanted, "--prediction", "all") == 4
    assert "Det 'det' cannot be differentiated by 'square'" in capsys.readouterr().err
    assert command(*wanted, "--prediction", "all", "--freeze", "square") == 0
    assert command(*wanted, "--prediction", "logits", "--force") == 0


def test_weights_of_convolutions_in_groups_are_trained(tmp_path: Path):
    grouped = onnx.load(RECORDED / "cnn.onnx")
    first = next(node for node in grouped.graph.node if node.op_type == "Conv")
    weight = next(each for each in grouped.graph.initializer if each.name == first.input[1])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight)[:, :1].copy(), weight.name))
    next(each for each in first.attribute if each.name == "group").i = 2
    onnx.save(grouped, tmp_path / "grouped.onnx")
    derived = derive(
        tmp_path / "grouped.onnx", tmp_path / "step.onnx", DeriveOptions(loss="cross-entropy", optimizer="sgd")
    )
    assert derived.parameters == derived.confirmed == 6


def test_what_cannot_be_derived_is_refused_by_name(tmp_path: Path, mlp: Path):
    model = forward_model()
    model.graph.node[1].CopyFrom(helper.make_node("SequenceConstruct", ["h"], ["list"]))
    model.graph.node.insert(2, helper.make_node("ConcatFromSequence", ["list"], ["t"], axis=0))
    onnx.save(model, tmp_path / "sequence.onnx")
    step = tmp_path / "step.onnx"
    options = DeriveOptions(loss="mse", optimizer="sgd")
    with pytest.raises(UnsupportedError, match=r"SequenceConstruct .* cannot be differentiated by .h.: "):
        derive(tmp_path / "sequence.onnx", step, options)
    (tmp_path / "damaged.onnx").write_bytes(mlp.read_bytes()[:50])
    with pytest.raises(InputError):
        derive(tmp_path / "damaged.onnx", step, options)
    assert not step.exists()


@pytest.mark.torch
@pytest.mark.parametrize("name", ALL_CASES)
def test_recorded_numbers_are_pytorchs(name: str):
    pytest.importorskip("torch")
    from derive_by_torch import torch_run

    recorded = np.load(RECORDED / "optimizers.npz")
    values, losses = torch_run(ALL_CASES[name])
    np.testing.assert_allclose(losses, recorded[f"{name}/losses"], rtol=1e-6)
    for parameter, value in values.items():
        np.testing.assert_allclose(value, recorded[f"{name}/{parameter}"], rtol=1e-5, atol=1e-6)  # on any processor


@pytest.mark.torch
@pytest.mark.parametrize("name", MODELS)
def test_recorded_gradients_are_pytorchs(name: str):
    pytest.importorskip("torch")
    from derive_by_torch import torch_gradients

    recorded = np.load(RECORDED / f"{name}.npz")
    for key, value in torch_gradients(name).items():
        np.testing.assert_allclose(value, recorded[key], rtol=1e-4, atol=1e-6, err_msg=key)


def test_without_the_library_the_extra_is_named(mlp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnx_ad", None)
    with pytest.raises(OptionError, match="need onnx-ad") as caught:
        derive(mlp, tmp_path / "step.onnx", DeriveOptions(loss="mse", optimizer="sgd"))
    assert caught.value.hints == ("pip install 'gopt[derive]'",)


def test_a_tie_that_an_exporter_split_is_noted(tmp_path: Path):
    model = forward_model()
    first = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(first.T), "folded"))
    model.graph.node.append(helper.make_node("MatMul", ["t", "folded"], ["again"]))
    model.graph.output.append(helper.make_tensor_value_info("again", TensorProto.FLOAT, [6, 4]))
    onnx.save(model, tmp_path / "m.onnx")
    options = DeriveOptions(loss="mse", optimizer="sgd", prediction="again")
    notes = derive(tmp_path / "m.onnx", tmp_path / "s.onnx", options).notes
    assert any("'w1' and 'folded' hold equal values" in note for note in notes)
    assert any("the loss does not depend on them: 'w2', 'b2'" in note for note in notes)


FILES = {
    "gru1": {"trainable": ("w",)},
    "declared_rank": {"dims": {"N": 2}},
    "declared_size": {"dims": {"N": 2}},
    "twice_opset17": {"dims": {"N": 2}},
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_the_checker_accepts_are_derived(name: str, tmp_path: Path):
    """A GRU in front of what is trained; shapes that hold for another size; one domain imported twice."""
    options = DeriveOptions(loss="mse", optimizer="sgd", **FILES[name])
    assert gopt.derive(FIXTURES / f"cases/derive/{name}.onnx", tmp_path / "s.onnx", options).confirmed == 1


@pytest.mark.parametrize(
    ("name", "options", "cause"),
    [
        ("if_ranks_differ", {}, "'y' is unknown: onnx infers none for the result of If 'u'"),
        ("cache_add", {"dims": {"N": 2}, "prediction": "y"}, "output 'h_out' is the next value of input 'h'"),
    ],
)
def test_what_is_refused_is_told_by_its_operator(name: str, options: dict[str, object], cause: str, tmp_path: Path):
    wanted = DeriveOptions(loss="mse", optimizer="sgd", **options)
    with pytest.raises(UnsupportedError, match=re.escape(cause)) as caught:
        gopt.derive(FIXTURES / f"cases/derive/{name}.onnx", tmp_path / "s.onnx", wanted)
    assert not any("--batch" in hint for hint in caught.value.hints)


def test_gradients_are_checked_on_batches_of_the_user(tmp_path: Path):
    """Where random inputs leave a unit dead, real ones do not; data that fits no input is refused."""
    text = """<ir_version: 10, opset_import: ["" : 20]>
    dead (float[4, 3] x) => (float[4, 2] y) <float[3, 2] w = {0.3, -0.5, 0.7, 0.2, -0.9, 0.4}, float[1] far = {-50}>
    { s = Add(x, far)  r = Relu(s)  y = MatMul(r, w) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    options = {"loss": "mse", "optimizer": "sgd", "trainable": ("w",)}
    with pytest.raises(UnsupportedError, match="nothing was compared"):
        gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", DeriveOptions(**options))
    random = np.random.default_rng(0)
    x, target = random.normal(50, 3, (12, 3)).astype(np.float32), random.normal(0, 1, (12, 2)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, target=target)
    data = DeriveOptions(**options, data=str(tmp_path / "d.npz"))
    assert gopt.derive(tmp_path / "m.onnx", tmp_path / "s.onnx", data).confirmed == 1
