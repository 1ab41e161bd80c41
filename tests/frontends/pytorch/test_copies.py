"""Copies of training code: hooks, and functions that hold a part of it. By hand, ``pytest -m torch``."""

from __future__ import annotations

import copy
import functools

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from code_gen.oracle import Exported  # noqa: E402
from torch import nn  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.copies import rebound  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def step(module, loss, **hooks):
    batch = {"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}
    return module, loss, torch.optim.SGD(module.parameters(), 0.1), batch


def plain(module, given):
    return F.cross_entropy(module(given["x"]), given["y"])


def after_a_step(made, path):
    """The states of the file after one step, beside those before it."""
    export(made, path)
    file = Exported(path)
    before = dict(file.held)
    file.step({name: value.numpy() for name, value in made[3].items()} | {"lr": np.asarray(0.1, np.float32)})
    return before, file.held


def _forget(parameter):
    parameter.grad.zero_()


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_hook_of_a_parameter_changes_its_gradient_in_the_file(kind, tmp_path):
    """``copy.deepcopy`` of a parameter drops its hooks, so that eager PyTorch lost them too."""
    module = net()
    if kind == "before":
        module[0].weight.register_hook(lambda slope: slope * 0)
    else:
        module[0].weight.register_post_accumulate_grad_hook(_forget)
    before, after = after_a_step(step(module, plain), tmp_path / "step.onnx")
    assert (before["0.weight"] == after["0.weight"]).all()
    assert (before["0.bias"] != after["0.bias"]).any()


def test_a_loss_that_holds_the_module_trains_it(tmp_path):
    module = net()
    before, after = after_a_step(step(module, lambda given, batch: plain(module, batch)), tmp_path / "step.onnx")
    assert all((before[name] != after[name]).any() for name in before)


def test_a_loss_that_holds_parameters_gives_them_gradients(tmp_path):
    module = net()
    weights = list(module.parameters())

    def loss(module, batch):
        return plain(module, batch) + sum(each.square().sum() for each in weights)

    assert export(step(module, loss), tmp_path / "step.onnx").checked


def test_a_list_of_parameters_in_a_module_holds_the_traced_ones(tmp_path):
    module = net()
    module.all = list(module.parameters())

    def loss(given, batch):
        return plain(given, batch) + sum(each.square().sum() for each in given.all)

    assert export(step(module, loss), tmp_path / "step.onnx").checked


def test_a_hook_of_an_optimizer_may_hold_the_module(tmp_path):
    made = step(module := net(), plain)

    def short(*given):
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)

    made[2].register_step_pre_hook(short)
    before, after = after_a_step(made, tmp_path / "step.onnx")
    assert sum(float(((before[name] - after[name]) ** 2).sum()) for name in before) ** 0.5 <= 0.1 * 0.0101


def test_a_loss_that_trains_a_module_by_a_global_name_is_refused(tmp_path):
    globals()["held"] = module = net()
    with pytest.raises(UnsupportedError, match="by another way than the one it is given: a global name"):
        export(step(module, lambda given, batch: plain(held, batch)), tmp_path / "step.onnx")  # noqa: F821


def test_functions_hold_the_copies_of_a_copied_recipe():
    module = net()

    def inner(given=module):
        return given

    def loss(given, batch):
        return inner, functools.partial(inner, module), [module]

    copied = copy.deepcopy(
        make_recipe((module, loss, torch.optim.SGD(module.parameters(), 0.1), {"x": torch.ones(2, 6)}))
    )
    function, partial, (held,) = copied.loss(None, None)
    assert function() is partial() is held is copied.module is not module
    assert [each() for each in loss(None, None)[:2]] == [module, module], "the original is as it was"


def test_what_holds_no_part_is_returned_as_it_is():
    count = [0]

    def loss(given, batch):
        return count

    assert rebound(loss, {1: 2}) is loss


class Margin(nn.Module):
    """A loss with a parameter and a running buffer of its own."""

    def __init__(self):
        super().__init__()
        self.sharp = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, module, batch):
        found = module(batch["x"])
        with torch.no_grad():
            self.center.mul_(0.9).add_(found.mean(0), alpha=0.1)
        return F.cross_entropy((found - self.center) * self.sharp, batch["y"])


def test_a_loss_that_is_a_module_has_parameters_and_buffers_of_its_own(tmp_path):
    module, loss = net(), Margin()
    made = step(module, loss)
    optimizer = torch.optim.SGD([*module.parameters(), *loss.parameters()], 0.1)
    before, after = after_a_step((module, loss, optimizer, made[3]), tmp_path / "step.onnx")
    assert all((before[name] != after[name]).any() for name in ("loss.sharp", "loss.center"))
