"""Training code as users write it, whose trap was found by exporting it. By hand, ``pytest -m torch``."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.ir.load import load  # noqa: E402


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch():
    return {"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}


def step(loss, module=None, **options):
    module = module or net()
    return module, loss, torch.optim.SGD(module.parameters(), 0.1, **options), batch()


def plain(module, given):
    return F.cross_entropy(module(given["x"]), given["y"])


def test_adam_at_a_rate_of_zero_leaves_what_has_no_gradient(tmp_path):
    """A warm-up begins at 0, and rows of a table that no sample has read have no moments: 0 / 0."""
    table = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(table.parameters(), 1e-3)
    given = (torch.randint(0, 4, (5, 2)), torch.randint(0, 3, (5,)))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert export((table, F.cross_entropy, optimizer, given, warm_up), tmp_path / "step.onnx").checked


def test_weights_with_a_norm_of_their_own(tmp_path):
    norm = parametrizations.weight_norm
    layers = nn.Sequential(norm(nn.Conv1d(3, 4, 3)), nn.GELU(), norm(nn.Conv1d(4, 2, 3, groups=2), dim=1))
    given = (torch.randn(2, 3, 9), torch.randn(2, 2, 5))
    assert export((layers, F.l1_loss, torch.optim.SGD(layers.parameters(), 0.1), given), tmp_path / "step.onnx").checked


class Averaged(nn.Module):
    """As BYOL: the target follows the trained part in each forward, and gets no gradient."""

    def __init__(self):
        super().__init__()
        self.online = net()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, theirs in zip(self.online.parameters(), self.target.parameters()):
                theirs.mul_(0.9).add_(mine, alpha=0.1)
            aim = self.target(x)
        return self.online(x + 1) - aim


def test_frozen_parameters_that_the_module_changes_are_states(tmp_path):
    found = export(step(plain, Averaged()), tmp_path / "step.onnx")
    assert found.states == 8 and "target.0.weight_out" in load(tmp_path / "step.onnx").outputs


class Bounded(nn.Module):
    """Its buffer keeps its value in the first steps alone."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("top", torch.full((3,), 100.0))

    def forward(self, x):
        found = self.inner(x)
        with torch.no_grad():
            self.top.copy_(torch.maximum(self.top, found.abs().amax(0)))
        return found / self.top


def test_a_buffer_that_is_written_with_the_same_value_is_a_state(tmp_path):
    assert export(step(plain, Bounded()), tmp_path / "step.onnx").states == 5
    assert "top_out" in load(tmp_path / "step.onnx").outputs


def test_hooks_of_an_optimizer_run_in_eager_steps_too(tmp_path):
    made = step(plain)

    def bound(optimizer, args, kwargs):
        with torch.no_grad():
            for each in optimizer.param_groups[0]["params"]:
                each.clamp_(-0.1, 0.1)

    made[2].register_step_post_hook(bound)
    assert export(made, tmp_path / "step.onnx").checked


class Capturing(nn.Module):
    """As transformers: the first forward adds a hook, and an attribute says that it is there."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.seen = []

    def forward(self, x):
        self.seen = []
        if not getattr(self, "hooked", False):
            self.hooked = True
            self.inner[0].register_forward_hook(_append)
        self.inner[0].owner = [self]
        return self.inner(x) * len(self.seen)


def _append(module, given, found):
    module.owner[0].seen.append(found)


def test_hooks_that_a_forward_adds_are_gone_after_the_trace(tmp_path):
    assert export(step(plain, Capturing()), tmp_path / "step.onnx").checked


def test_an_input_that_gets_a_gradient(tmp_path):
    def loss(module, given):
        x = given["x"].requires_grad_(True)
        (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    made = step(loss)
    assert export(made, tmp_path / "step.onnx").checked
    assert not made[3]["x"].requires_grad


def test_a_branch_on_values_is_refused_with_its_line(tmp_path):
    def loss(module, given):
        found = plain(module, given)
        return found * 2 if found > 1 else found

    with pytest.raises(UnsupportedError, match=r"the step branches on a value .*in test_training_code.py, line"):
        export(step(loss), tmp_path / "step.onnx")


def by_python():
    return random.random()


def by_numpy():
    return float(np.random.beta(0.4, 0.4))


@pytest.mark.parametrize("drawn", [by_python, by_numpy])
def test_random_numbers_of_python_are_refused(drawn, tmp_path):
    """Each would be a constant of the graph."""
    with pytest.raises(UnsupportedError, match="random numbers by Python's random or by NumPy"):
        export(step(lambda module, given: plain(module, given) * drawn()), tmp_path / "step.onnx")


def test_layers_that_python_leaves_out_at_random_are_refused_by_that(tmp_path):
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x) if random.random() < 0.5 else x
            return self.head(x)

    with pytest.raises(UnsupportedError, match="random numbers by Python's random or by NumPy"):
        export(step(plain, Dropped()), tmp_path / "step.onnx")


def test_complex_parameters_are_refused_by_name(tmp_path):
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x):
            return (self.inner(x) * self.turn).abs()

    with pytest.raises(UnsupportedError, match="'turn' is complex"):
        export(step(plain, Turned()), tmp_path / "step.onnx")


def test_an_operator_that_onnx_lacks_is_named(tmp_path):
    def loss(module, given):
        return plain(module, given) + module[0].weight.cummax(1).values.sum()

    with pytest.raises(UnsupportedError, match=r"ONNX has none of aten\.cummax"):
        export(step(loss), tmp_path / "step.onnx")


def test_what_cannot_be_traced_is_refused_with_its_line(tmp_path):
    def loss(module, given):
        return plain(module, given) + torch.linalg.inv(module[0].weight[:6] + 3 * torch.eye(6)).sum()

    with pytest.raises(UnsupportedError, match=r"cannot be traced: .*in test_training_code.py, line .*linalg.inv"):
        export(step(loss), tmp_path / "step.onnx")


class Reshaped(torch.optim.SGD):
    """Its state gets another shape in the step that stores it."""

    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            self.state[each]["sum"] = each.grad.detach().clone()
            self.state[each]["sum"] = each.grad.sum().reshape(1, 1)
        super().step(closure)


def test_a_state_that_changes_its_shape_is_refused_by_name(tmp_path):
    module = net()
    made = module, plain, Reshaped(module.parameters(), 0.1), batch()
    with pytest.raises(UnsupportedError, match=r"changes the shape of its state '0.weight.sum': \[8, 6\]"):
        export(made, tmp_path / "step.onnx")


def test_a_permutation_is_an_input(tmp_path):
    def mixed(module, given):
        order = torch.randperm(4)
        return plain(module, given) + F.cross_entropy(module(given["x"]), given["y"][order])

    assert "draw_0" in export(step(mixed), tmp_path / "step.onnx").inputs
