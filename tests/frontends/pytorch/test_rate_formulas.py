"""Rates of schedulers as formulas and tables, beside eager PyTorch's step by step. ``pytest -m torch``."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from gopt.cli.main import main  # noqa: E402
from torch.optim import lr_scheduler as schedules  # noqa: E402

import gopt  # noqa: E402
from gopt.artifact.manifest_check import read_manifest  # noqa: E402
from gopt.documents.default_values import DefaultValue  # noqa: E402
from gopt.errors import OptionError, UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402
from gopt.frontends.pytorch.hyper import hyper_inputs  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions, Schedules  # noqa: E402
from gopt.frontends.pytorch.rate_formulas import default_values  # noqa: E402
from gopt.runtime.training.schedules import default_schedule  # noqa: E402

RATE, STEPS = 0.1, 400


def transformers_cosine(warmup: int, total: int):
    """As ``get_cosine_schedule_with_warmup`` of transformers."""

    def rule(step: int) -> float:
        if step < warmup:
            return float(step) / float(max(1, warmup))
        progress = float(step - warmup) / float(max(1, total - warmup))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))

    return lambda o: schedules.LambdaLR(o, rule)


def nano(warmup: int, total: int, least: float):
    """As nanoGPT computes its rate: the lowest one stays."""

    def rule(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        share = min(1.0, (step - warmup) / (total - warmup))
        return least + 0.5 * (1 + math.cos(math.pi * share)) * (1 - least)

    return lambda o: schedules.LambdaLR(o, rule)


def transformers_linear(warmup: int, total: int):
    def rule(step: int) -> float:
        if step < warmup:
            return float(step) / float(max(1, warmup))
        return max(0.0, float(total - step) / float(max(1, total - warmup)))

    return lambda o: schedules.LambdaLR(o, rule)


def sequence(warmup: int, total: int):
    """A warm-up and a cosine, each a scheduler of its own."""

    def made(o):
        warm = schedules.LinearLR(o, 0.1, total_iters=warmup)
        return schedules.SequentialLR(o, [warm, schedules.CosineAnnealingLR(o, total - warmup, eta_min=0.01)], [warmup])

    return made


def one_cycle(o):
    return schedules.OneCycleLR(o, 0.3, total_steps=STEPS, cycle_momentum=False)


FORMULAS = {
    "cosine with warm-up": (nano(9, 60, 0.1), "warmup-cosine:0.1:9:60:0.010000000000000002:0.010000000000000002"),
    "cosine that rises again": (transformers_cosine(10, 60), None),
    "cosine with warm-up, longer than what is seen": (
        transformers_cosine(10, 4000),
        "warmup-cosine:0.1:10:4000:0.0:0.0",
    ),
    "linear with warm-up": (transformers_linear(10, 60), "warmup-linear:0.1:10:60:0.0:0.0"),
    "warm-up alone": (transformers_linear(25, 10**7), None),
    "steps": (lambda o: schedules.StepLR(o, 7, 0.5), "step:0.1:7:0.5"),
    "cosine": (lambda o: schedules.CosineAnnealingLR(o, STEPS), "cosine:0.1:0.0:400"),
    "constant": (lambda o: schedules.LambdaLR(o, lambda step: 0.5 if step < 10**9 else 1.0), "0.05"),
    "a sequence that rises again": (sequence(20, 200), None),
    "a sequence, to its lowest": (sequence(20, 420), "warmup-cosine:0.1:20:420:0.01:0.010000000000000002"),
    "a sequence, not to its end": (sequence(20, 1500), "warmup-cosine:0.1:20:1500:0.01:0.010000000000000002"),
    "restarts": (lambda o: schedules.CosineAnnealingWarmRestarts(o, 30, 2), None),
    "one cycle": (one_cycle, None),
    "a cycle": (lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=9, cycle_momentum=False), None),
    "a function": (lambda o: schedules.LambdaLR(o, lambda step: 1 / math.sqrt(max(step, 5))), None),
}


def code(schedule):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), RATE)

    def loss(module, batch):
        return torch.nn.functional.cross_entropy(module(batch["x"]), batch["y"])

    rest = [] if schedule is None else [schedule(optimizer)]
    return net, loss, optimizer, {"x": torch.randn(6, 4), "y": torch.randint(0, 3, (6,))}, *rest


@pytest.mark.parametrize("name", FORMULAS)
def test_values_of_each_step_are_those_of_the_scheduler(name):
    schedule, text = FORMULAS[name]
    recipe = make_recipe(code(schedule))
    options = ExportOptions(schedules=Schedules.INPUT)
    given = default_values(recipe, hyper_inputs(recipe, options, False), False, STEPS)["lr"]
    if text is not None:
        assert given == DefaultValue(text, steps=STEPS)
    assert bool(given.table) == (text is None and name != "warm-up alone"), given
    found, (*_, optimizer, _, scheduler) = default_schedule("lr", given), code(schedule)
    assert found.steps == STEPS
    for step in range(STEPS):
        assert found.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-10), step
        optimizer.step()
        if step < STEPS - 1:
            scheduler.step()


@pytest.mark.parametrize("name", ["cosine with warm-up", "one cycle"])
def test_a_run_trains_with_the_schedulers_rates(name, tmp_path, capsys):
    """Exported, sharded and run with no rate: eager PyTorch with its scheduler has the same losses."""
    schedule = FORMULAS[name][0]
    found = export(code(schedule), tmp_path / "step.onnx", options=ExportOptions(schedule_steps=1000))
    assert found.to_json()["hyper"]["lr"] and any("gopt run feeds lr" in note for note in found.notes)
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    known = default_schedule("lr", read_manifest(tmp_path / "ranks")[0].defaults["lr"]).steps
    assert known == (401 if name == "one cycle" else 1000)
    net, loss, optimizer, batch, scheduler = code(schedule)
    data = {each: np.concatenate([value.numpy()] * 2) for each, value in batch.items()}
    ran = gopt.run(tmp_path / "ranks", data, 30)
    for step in range(30):
        optimizer.zero_grad()
        value = loss(net, batch)
        value.backward()
        optimizer.step()
        scheduler.step()
        assert ran.losses[step] == pytest.approx(float(value.detach()), rel=1e-5), step
    with pytest.raises(OptionError, match=f"lr has values for {known} steps, and steps is {known + 1}"):
        gopt.run(tmp_path / "ranks", data, known + 1)


def test_options_of_the_optimizer_are_remembered(tmp_path, capsys):
    def make():
        net, loss, _, batch = code(None)
        return net, loss, torch.optim.AdamW(net.parameters(), 3e-3, betas=(0.8, 0.95)), batch

    found = export(make, tmp_path / "step.onnx", options=ExportOptions(hyper=("betas", "weight_decay")))
    values = {"lr": "0.003", "betas_0": "0.8", "betas_1": "0.95", "weight_decay": "0.01"}
    assert found.hyper == {name: DefaultValue(text) for name, text in values.items()}
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    net, loss, optimizer, batch = make()
    data = {each: np.concatenate([value.numpy()] * 2) for each, value in batch.items()}
    np.savez(tmp_path / "d.npz", **data)
    assert main(["run", str(tmp_path / "ranks"), "--data", str(tmp_path / "d.npz"), "--steps", "5", "--json"]) == 0
    said = capsys.readouterr().err
    assert "lr is 0.003, betas_0 is 0.8, betas_1 is 0.95, weight_decay is 0.01, as the step has them" in said
    ran = gopt.run(tmp_path / "ranks", data, 5)
    for step in range(5):
        optimizer.zero_grad()
        value = loss(net, batch)
        value.backward()
        optimizer.step()
        assert ran.losses[step] == pytest.approx(float(value.detach()), rel=1e-5), step


def test_a_schedule_in_the_graph_starts_from_the_rate_before_it(tmp_path):
    found = export(code(lambda o: schedules.StepLR(o, 2, 0.5)), tmp_path / "step.onnx")
    assert found.hyper == {"lr": DefaultValue("0.1")}
    assert "gopt.roles" in {each.key for each in onnx.load(found.model).metadata_props}


SGD, ADAM = ((lambda p: torch.optim.SGD(p, RATE, momentum=0.9)), (lambda p: torch.optim.AdamW(p, 3e-3)))
CYCLES = {
    "one cycle": (SGD, "momentum", lambda o: schedules.OneCycleLR(o, 0.3, total_steps=30)),
    "one cycle of Adam": (ADAM, "betas_0", lambda o: schedules.OneCycleLR(o, 0.01, total_steps=30)),
    "a cycle": (SGD, "momentum", lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=4)),
    "groups": (
        lambda p: torch.optim.SGD([{"params": each, "lr": RATE / 2**k} for k, each in enumerate(p)], momentum=0.9),
        "momentum", lambda o: schedules.OneCycleLR(o, 0.3, 30, max_momentum=[0.95, 0.9]),
    ),
}  # fmt: skip


def cycle(name: str):
    optimizer, _, schedule = CYCLES[name]
    net, loss, _, batch = code(None)
    made = optimizer(net.parameters())
    return net, loss, made, batch, schedule(made)


@pytest.mark.parametrize("name", CYCLES)
def test_a_momentum_that_the_scheduler_moves_is_fed_as_its_rate_is(name, tmp_path):
    """Exported, sharded and run with nothing set, the step makes the losses, states and state dict of eager PyTorch."""
    found = export(cycle(name), tmp_path / "step.onnx", options=ExportOptions(schedule_steps=100))
    fed = [CYCLES[name][1], *([f"{CYCLES[name][1]}.1"] if name == "groups" else [])]
    assert [each for each in found.hyper if not each.startswith("lr")] == fed and all(map(found.hyper.get, fed))
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    net, loss, optimizer, batch, scheduler = cycle(name)
    data = {each: np.concatenate([value.numpy()] * 2) for each, value in batch.items()}
    ran = gopt.run(tmp_path / "ranks", data, 10, checkpoint=tmp_path / "at")
    for step in range(10):
        optimizer.zero_grad()
        value = loss(net, batch)
        value.backward()
        optimizer.step()
        scheduler.step()
        assert ran.losses[step] == pytest.approx(float(value.detach()), rel=1e-5), step
    gopt.save_state_dict(next((tmp_path / "at").glob("step_*")), tmp_path / "all.pt", all_states=True)
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    for mine, theirs in zip(content["optimizer"]["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
        for key in {"lr", "momentum", "betas"} & theirs.keys():
            assert mine[key] == pytest.approx(theirs[key], rel=1e-9), key
    for key, each in net.state_dict().items():
        assert torch.allclose(content["model"][key], each, atol=1e-5), key


def test_a_momentum_that_moves_has_no_closed_form(tmp_path):
    with pytest.raises(UnsupportedError, match="it changes 'momentum' beside the rate"):
        export(cycle("one cycle"), tmp_path / "step.onnx", options=ExportOptions(schedules=Schedules.GRAPH))


def test_a_beta_that_moves_meets_a_gradient_of_other_strides(tmp_path):
    """A vision transformer's patches: the gradient of their kernel is no contiguous one."""

    def make():
        torch.manual_seed(0)
        patches = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Flatten(2))
        optimizer = torch.optim.AdamW(patches.parameters(), 1e-3)
        rest = schedules.OneCycleLR(optimizer, 3e-3, total_steps=40)
        return (
            patches,
            lambda m, b: m(b["x"]).transpose(1, 2).square().mean(),
            optimizer,
            {"x": torch.randn(4, 3, 16, 16)},
            rest,
        )

    assert "betas_0" in export(make, tmp_path / "step.onnx").inputs
