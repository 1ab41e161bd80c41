"""Groups whose rates a schedule takes apart. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler as schedules  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
from gopt.frontends.pytorch.rates import Rates, group_rates, share_of  # noqa: E402


def code(optimizers, schedule=None, chosen=0):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    made = optimizers(module)
    rest = [] if schedule is None else [schedule(made[chosen])]
    return module, F.cross_entropy, made, (torch.randn(3, 4), torch.tensor([0, 1, 2])), *rest


def groups(module, first=0.1, second=0.05):
    parts = [{"params": module[0].parameters(), "lr": first}, {"params": module[1].parameters(), "lr": second}]
    return [torch.optim.SGD(parts)]


def two(module):
    return [torch.optim.SGD(module[0].parameters(), 0.1), torch.optim.Adam(module[1].parameters(), 0.01)]


APART = {
    "a function for each group": code(
        groups, lambda o: schedules.LambdaLR(o, [lambda step: 1.0, lambda step: 0.1 if step > 3 else 1.0])
    ),
    "equal for thousands of steps": code(
        groups, lambda o: schedules.LambdaLR(o, [lambda step: 1.0, lambda step: 0.1 if step > 10**5 else 1.0])
    ),
    "one of two optimizers": code(two, lambda o: schedules.StepLR(o, 10**5)),
    "a lowest rate": code(groups, lambda o: schedules.CosineAnnealingWarmRestarts(o, 5, eta_min=0.01)),
}


@pytest.mark.parametrize("name", APART)
def test_rates_that_are_no_multiples_have_inputs_of_their_own(name, tmp_path):
    """Three steps do not show it, and one ``lr`` would change both."""
    found = export(APART[name], tmp_path / "step.onnx", options=ExportOptions(check=6))
    assert {"lr", "lr.1"} <= set(found.inputs)
    assert any("lr.1 is the rate of group" in note for note in found.notes)


def test_rates_that_stay_multiples_share_one(tmp_path):
    found = export(
        code(groups, lambda o: schedules.CyclicLR(o, 0.01, 0.1, cycle_momentum=False)), tmp_path / "step.onnx"
    )
    assert "lr" in found.inputs and "lr.1" not in found.inputs


def test_a_first_group_at_rest_leaves_the_rate_to_the_next(tmp_path):
    found = export(code(lambda module: groups(module, 0.0, 0.1)), tmp_path / "step.onnx")
    assert "lr" in found.inputs and found.checked


def test_a_rate_that_waits_for_a_metric_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="ReduceLROnPlateau computes the rate from a metric") as raised:
        export(code(two, schedules.ReduceLROnPlateau), tmp_path / "step.onnx")
    assert raised.value.hints == ("leave it out, and feed lr: gopt run --resume --set lr=... goes on at another rate",)


def test_a_rate_that_waited_for_a_metric_is_fed_by_hand(tmp_path):
    """What the hint of that refusal says, beside eager PyTorch with the scheduler itself."""
    recipe = code(lambda module: [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)])
    module, loss, (optimizer,), _ = recipe
    export(recipe, tmp_path / "step.onnx")
    gopt.shard(gopt.load(tmp_path / "step.onnx"), 1).write(tmp_path / "ranks")
    rows = {"input": torch.randn(12, 4), "target": torch.arange(12) % 3}
    arrays = {name: value.numpy() for name, value in rows.items()}
    scheduler = schedules.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    for step, rate in ((2, "0.1"), (4, "0.01")):
        run = gopt.run(
            tmp_path / "ranks", arrays, step, settings={"lr": rate}, checkpoint=tmp_path / "kept", resume=step > 2
        )
        assert optimizer.param_groups[0]["lr"] == pytest.approx(float(rate))
        for made in run.steps:
            optimizer.zero_grad()
            part = slice(3 * made.step - 3, 3 * made.step)
            found = loss(module(rows["input"][part]), rows["target"][part])
            found.backward()
            optimizer.step()
            assert made.loss == pytest.approx(found.item(), rel=1e-5)
        scheduler.step(1.0)
        scheduler.step(1.0)


def test_schedules_in_a_chain_are_fed(tmp_path):
    chain = lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o, 0.3, 2), schedules.ExponentialLR(o, 0.9)])  # noqa: E731
    assert export(code(groups, chain), tmp_path / "step.onnx").checked


def test_shares_of_rates():
    assert share_of(Rates((0.1, 0.2)), Rates((0.2, 0.4))) == pytest.approx(0.5)
    assert share_of(Rates((0.1, 0.2)), Rates((0.2, 0.2))) is None
    assert share_of(Rates((0.1, 0.2), "a"), Rates((0.2, 0.4), "b")) is None
    assert share_of(Rates((0.0, 0.0), "a"), Rates((0.2, 0.4), "b")) == 0.0
    assert share_of(Rates((0.1, 0.1)), Rates((0.0, 0.1))) is None


def test_rates_of_all_groups_over_a_schedule():
    recipe = make_recipe(code(two, lambda o: schedules.StepLR(o, 2, 0.5)))
    found = group_rates(recipe, scheduled=False)
    assert found[0, 0].values[:3] == (0.1, 0.1, 0.05) and set(found[1, 0].values) == {0.01}
    assert recipe.optimizers[0].param_groups[0]["lr"] == 0.1, "a copy took the steps"
