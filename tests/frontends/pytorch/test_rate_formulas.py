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
from gopt.errors import OptionError  # noqa: E402
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


def in_sequence(o):
    return schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=20), schedules.CosineAnnealingLR(o, 380, eta_min=0.01)], [20]
    )


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
    "a sequence": (in_sequence, None),
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
