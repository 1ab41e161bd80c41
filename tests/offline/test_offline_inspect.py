"""The optimizer and what steers it, recovered on every fixture and on updates spelled in other ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from offline_graphs import FIXTURES, NAMES, Step, fixture, inspected, scrambled, step_with

from gopt import api
from gopt.errors import InputError
from gopt.offline.inspect import Inspection, inspect_model
from gopt.offline.inspect_folder import inspect_folder

pytestmark = pytest.mark.usefixtures("unchecked")

ADAMW = ("AdamW", {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "decoupled": True,
                   "bias_correction": True})  # fmt: skip
SGD = ("SGD", {"weight_decay": 0.0})


def momentum(beta: float) -> tuple[str, dict[str, object]]:
    return ("momentum", {"momentum": beta, "nesterov": False, "dampening": 0.0, "weight_decay": 0.0})


EXPECTED = {
    "cnn_mom_fp16": [momentum(0.9)],
    "cnn_sgd": [SGD],
    "emb_adamw": [ADAMW],
    "gpt_adamw": [ADAMW],
    "gpt_adamw_clip_sched_fp16": [ADAMW],
    "mlp_adagrad": [("Adagrad", {"eps": 1e-6, "weight_decay": 0.0})],
    "mlp_adamw": [ADAMW],
    "mlp_adamw_accum": [ADAMW],
    "mlp_adamw_bf16": [ADAMW],
    "mlp_adamw_external": [ADAMW],
    "mlp_adamw_fp16_scaler": [ADAMW],
    "mlp_lamb": [("LAMB", ADAMW[1])],
    "mlp_mom_clip_sched": [momentum(0.9)],
    "mlp_muon": [("non-elementwise update with 1 state", {}), momentum(0.95)],
    "mlp_ort_adamw": [ADAMW],
    "mlp_rmsprop": [("RMSProp", {"alpha": 0.99, "eps": 1e-6, "weight_decay": 0.0})],
    "mlp_sgd": [SGD],
    "mlp_torchoptim_adamw": [ADAMW],
}


def rules(found: Inspection) -> list[tuple[str, dict[str, object]]]:
    return [(each.name, dict(each.hyper)) for each in found.optimizers]


def test_every_fixture_is_expected() -> None:
    assert list(EXPECTED) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_and_hyper_parameters(name: str) -> None:
    found = inspect_model(api.load(FIXTURES / f"{name}.onnx"))
    assert rules(found) == EXPECTED[name]
    assert found.controls.learning_rate is not None and found.controls.learning_rate.input == "lr"
    json.dumps(found.to_json())


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("gpt")] + ["gpt_adamw_clip_sched_fp16"])
def test_names_do_not_matter(name: str, tmp_path: Path) -> None:
    plain = inspect_model(api.load(FIXTURES / f"{name}.onnx"))
    found = inspected(scrambled(fixture(name)), tmp_path)
    assert rules(found) == rules(plain)
    for field in ("finite_check", "loss_scale", "accumulation"):
        ours, theirs = getattr(found.controls, field), getattr(plain.controls, field)
        assert (ours is None) == (theirs is None)
    ours, theirs = ([replace(clip, norm="", coefficient="") for clip in each.controls.clips] for each in (found, plain))
    assert ours == theirs
    assert [each.nodes for each in found.phases] == [each.nodes for each in plain.phases]
    assert found.casts == plain.casts and found.bytes == plain.bytes


def test_schedule_and_clip() -> None:
    found = inspect_model(api.load(FIXTURES / "mlp_mom_clip_sched.onnx")).controls
    assert found.learning_rate is not None
    assert (len(found.learning_rate.schedule), found.learning_rate.follows) == (3, ("step",))
    (clip,) = found.clips
    assert (clip.kind, clip.bound, clip.norm_type, clip.gradients, clip.of) == ("global norm", 0.5, "2", 4, 4)


def test_loss_scale_and_finite_check() -> None:
    found = inspect_model(api.load(FIXTURES / "mlp_adamw_fp16_scaler.onnx"))
    controls = found.controls
    assert controls.finite_check is not None and controls.finite_check.states == 12
    scale = controls.loss_scale
    assert scale is not None and scale.input == "loss_scale"
    assert (scale.dynamic, scale.growth, scale.backoff, scale.interval) == (True, 2.0, 0.5, 2000.0)
    assert (found.casts.parameters, found.casts.gradients, found.casts.dtypes) == (4, 4, ("float16",))


def test_accumulation() -> None:
    found = inspect_model(api.load(FIXTURES / "mlp_adamw_accum.onnx"))
    assert found.controls.accumulation is not None
    assert (found.controls.accumulation.accumulators, found.controls.accumulation.every) == (4, 2.0)
    assert [state.role for state in found.parameters[0].states] == ["first moment", "second moment", "summed gradient"]


@pytest.mark.parametrize("name", ["mlp_adamw", "mlp_sgd", "gpt_adamw"])
def test_what_is_not_there_is_not_found(name: str) -> None:
    controls = inspect_model(api.load(FIXTURES / f"{name}.onnx")).controls
    assert (controls.finite_check, controls.loss_scale, controls.accumulation) == (None,) * 3
    assert not controls.clips


def test_parameters_and_statistics() -> None:
    found = inspect_model(api.load(FIXTURES / "cnn_sgd.onnx"))
    assert len(found.parameters) == 9 and len(found.statistics) == 4
    weight = found.parameters[0]
    assert (weight.name, weight.shape, weight.mode, weight.optimizer) == ("conv1.weight", (8, 1, 3, 3), "split", "SGD")
    assert found.bytes["parameter"] == 15432 and found.bytes["optimizer_state"] == 0
    muon = inspect_model(api.load(FIXTURES / "mlp_muon.onnx"))
    assert [each.mode for each in muon.parameters] == ["whole", "split", "whole", "split"]


# --- other optimizers, other spellings ------------------------------------------------------------------------------


def nesterov(s: Step) -> None:
    g = s.op("Add", s.gradient, s.mul("w", s.number(0.1)))
    buffer = s.op("Add", s.mul(s.number(0.8), "m"), g)
    s.state("w", s.op("Sub", "w", s.mul("lr", s.op("Add", g, s.mul(buffer, s.number(0.8))))))
    s.state("m", buffer)


def velocity(s: Step) -> None:
    """Momentum with the learning rate inside the buffer."""
    new = s.op("Sub", s.mul("m", s.number(0.7)), s.mul("lr", s.gradient))
    s.state("w", s.op("Add", "w", new))
    s.state("m", new)


def corrections(s: Step, *betas: float) -> list[str]:
    later = s.op("Add", "t", s.number(1.0))
    s.state("t", later, [])
    return [s.op("Sub", s.number(1.0), s.op("Pow", s.number(beta), later)) for beta in betas]


def adamax(s: Step) -> None:
    (c1,) = corrections(s, 0.9)
    m = s.mean("m", s.gradient, 0.9)
    u = s.op("Max", s.mul("u", s.number(0.99)), s.op("Add", s.op("Abs", s.gradient), s.number(1e-5)))
    s.state("w", s.op("Sub", "w", s.op("Div", s.mul(s.op("Div", "lr", c1), m), u)))
    s.state("m", m)
    s.state("u", u)


def lion(s: Step) -> None:
    direction = s.op("Sign", s.mean("m", s.gradient, 0.9))
    s.state(
        "w", s.op("Sub", s.mul("w", s.op("Sub", s.number(1.0), s.mul("lr", s.number(0.2)))), s.mul("lr", direction))
    )
    s.state("m", s.mean("m", s.gradient, 0.98))


def adam_l2(s: Step, *, late: bool = False, root: bool = False, amsgrad: bool = False, corrected: bool = True) -> None:
    g = s.op("Add", s.gradient, s.mul(s.number(0.05), "w"))
    m, v = s.mean("m", g, 0.9), s.mean("v", s.mul(g, g), 0.95)
    eps = s.number(1e-4)
    top = s.op("Max", "top", v) if amsgrad else v
    if late:  # lr * sqrt(c2) / c1 * m / (sqrt(v) + eps)
        c1, c2 = corrections(s, 0.9, 0.95)
        rate = s.op("Div", s.mul("lr", s.op("Sqrt", c2)), c1)
        step = s.op("Div", s.mul(rate, m), s.op("Add", s.op("Sqrt", top), eps))
    else:
        c1, c2 = corrections(s, 0.9, 0.95) if corrected else (s.number(1.0), s.number(1.0))
        hat = s.op("Div", top, c2)
        below = s.op("Sqrt", s.op("Add", hat, eps)) if root else s.op("Add", s.op("Pow", hat, s.number(0.5)), eps)
        step = s.mul("lr", s.op("Div", m, c1), s.op("Reciprocal", below))
    s.state("w", s.op("Sub", "w", step))
    s.state("v", v)
    s.state("m", m)
    if amsgrad:
        s.state("top", top)


def adam_up(s: Step) -> None:
    """Adam that adds its step: it goes up what it takes for a gradient."""
    m, v = s.mean("m", s.gradient, 0.9), s.mean("v", s.mul(s.gradient, s.gradient), 0.95)
    below = s.op("Add", s.op("Sqrt", v), s.number(1e-4))
    s.state("w", s.op("Add", "w", s.mul("lr", s.op("Div", m, below))))
    s.state("v", v)
    s.state("m", m)


def adagrad_slower(s: Step) -> None:
    """Adagrad with a rate that decays, and decay of its own."""
    later = s.op("Add", "t", s.number(1.0))
    s.state("t", later, [])
    v = s.op("Add", "v", s.mul(s.gradient, s.gradient))
    rate = s.op("Div", "lr", s.op("Add", s.number(1.0), s.mul("t", s.number(0.001))))
    kept = s.mul("w", s.op("Sub", s.number(1.0), s.mul("lr", s.number(0.02))))
    step = s.mul(rate, s.op("Div", s.gradient, s.op("Add", s.op("Sqrt", v), s.number(1e-6))))
    s.state("w", s.op("Sub", kept, step))
    s.state("v", v)


def beta_input(s: Step) -> None:
    """Momentum whose coefficient is an input: no constant to report."""
    s.extra.append("beta")
    buffer = s.op("Add", s.mul("m", "beta"), s.gradient)
    s.state("w", s.op("Sub", "w", s.mul("lr", buffer)))
    s.state("m", buffer)


def odd(s: Step) -> None:
    """Elementwise, and no rule that has a name."""
    buffer = s.op("Tanh", s.op("Add", "m", s.gradient))
    s.state("w", s.op("Sub", "w", s.mul("lr", buffer)))
    s.state("m", buffer)


def constant_rate(s: Step) -> None:
    s.state("w", s.op("Sub", "w", s.mul(s.number(0.25), s.mul(s.gradient, "lr"))))


ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.05, "decoupled": False, "bias_correction": True}
SPELLINGS = {
    "nesterov": (nesterov, "momentum", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "decoupled": False}),
    "velocity": (velocity, "momentum", {"momentum": 0.7, "nesterov": False, "dampening": 0.0}),
    "adamax": (adamax, "Adamax", {"beta1": 0.9, "beta2": 0.99, "eps": 1e-5, "bias_correction": True}),
    "lion": (lion, "Lion", {"beta1": 0.9, "beta2": 0.98, "weight_decay": 0.2, "decoupled": True}),
    "adam": (adam_l2, "Adam", ADAM),
    "adam_late": (lambda s: adam_l2(s, late=True), "Adam", ADAM),
    "adam_root": (lambda s: adam_l2(s, root=True), "Adam", ADAM | {"eps_inside_root": True}),
    "adam_amsgrad": (lambda s: adam_l2(s, amsgrad=True), "Adam", ADAM | {"amsgrad": True}),
    "adam_plain": (lambda s: adam_l2(s, corrected=False), "Adam", ADAM | {"bias_correction": False}),
    "adam_up": (adam_up, "Adam", {"beta1": 0.9, "eps": 1e-4, "bias_correction": False, "maximize": None}),
    "adagrad_slower": (adagrad_slower, "Adagrad", {"lr_decay": 0.001, "weight_decay": 0.02, "decoupled": True}),
    "beta_input": (beta_input, "momentum", {"momentum": None, "nesterov": False, "weight_decay": 0.0}),
    "odd": (odd, "elementwise update with 1 state", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SPELLINGS)
def test_spellings(case: str, tmp_path: Path) -> None:
    update, name, hyper = SPELLINGS[case]
    found = inspected(step_with(update), tmp_path)
    assert [each.name for each in found.optimizers] == [name]
    assert hyper.items() <= dict(found.optimizers[0].hyper).items()
    rate = found.controls.learning_rate
    assert rate is not None and rate.input == "lr"
    assert found.optimizers[0].recognised == (case != "odd")


def test_what_cannot_be_told_apart_is_none(tmp_path: Path) -> None:
    """A constant factor of the gradient: dampening, or a scale of the loss?"""

    def update(s: Step) -> None:
        buffer = s.op("Add", s.mul("m", s.number(0.9)), s.mul(s.gradient, s.number(0.3)))
        s.state("w", s.op("Sub", "w", s.mul("lr", buffer)))
        s.state("m", buffer)

    found = inspected(step_with(update), tmp_path).optimizers[0]
    assert (found.name, found.hyper["momentum"], found.hyper["dampening"]) == ("momentum", 0.9, None)
    found = inspected(step_with(constant_rate), tmp_path).optimizers[0]
    assert (found.name, found.hyper["weight_decay"]) == ("SGD", 0.0)


# --- folders --------------------------------------------------------------------------------------------------------


def test_folder(tmp_path: Path) -> None:
    report = api.shard(api.load(FIXTURES / "mlp_adamw.onnx"), 3).write(tmp_path / "out").to_json()
    found = inspect_folder(tmp_path / "out")
    assert (found.mesh, found.ranks, found.sharded, found.replicated) == ((("shard", 3),), 3, 8, 5)
    assert found.states == {"scalar": 1, "parameter": 4, "optimizer_state": 8}
    assert [each.optimizer_states for each in found.per_rank] == [
        row["bytes"]["optimizer_states"] for row in report["ranks"]
    ]
    assert found.balance == report["balance"]
    json.dumps(found.to_json())


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": "gopt-manifest/1"}', '{"format": "other"}'])
def test_damaged_folder(damage: str, tmp_path: Path) -> None:
    api.shard(api.load(FIXTURES / "mlp_sgd.onnx"), 2).write(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").write_text(damage)
    with pytest.raises(InputError):
        inspect_folder(tmp_path / "out")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not an output folder"):
        inspect_folder(tmp_path)
