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

from gopt.errors import InputError, UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
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


def test_a_number_that_scaled_flags_are_added_to(tmp_path):
    def weighed(module, given):
        out = module(given["x"])
        weight = torch.sub(1.5, torch.add(0.25, out > 0, alpha=0.5), alpha=2.0)
        return F.cross_entropy(out * weight, given["y"])

    assert export(step(weighed), tmp_path / "step.onnx").checked


def test_a_number_of_python_has_no_gradient(tmp_path):
    def weighed(module, given):
        out = module(given["x"])
        return F.cross_entropy(out, given["y"]) * (1.0 + out.square().mean().item())

    assert export(step(weighed), tmp_path / "step.onnx").checked


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
    """Its state has another shape for a while, in each step."""

    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            self.state[each]["sum"] = each.grad.detach().clone()
            self.state[each]["sum"] = each.grad.sum().reshape(1, 1)
        super().step(closure)


class Growing(torch.optim.SGD):
    """Its state has one more row in each step."""

    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            rows = [self.state[each]["seen"]] if "seen" in self.state[each] else []
            self.state[each]["seen"] = torch.cat([*rows, each.grad.detach().sum().reshape(1)])
        super().step(closure)


def test_a_state_that_changes_its_shape_is_refused_by_name(tmp_path):
    module = net()
    made = module, plain, Growing(module.parameters(), 0.1), batch()
    with pytest.raises(UnsupportedError, match=r"the shape of its state '0.weight.seen': \[1\] becomes \[2\]"):
        export(made, tmp_path / "step.onnx")
    module = net()
    export((module, plain, Reshaped(module.parameters(), 0.1), batch()), tmp_path / "step.onnx")


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sum_of_gradients_that_cancel_is_rounding(seed, tmp_path):
    """The gradients of a softmax's bias add up to zero, but for rounding: either side may have the very zero."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    data = torch.randn(8, 4), torch.randint(0, 3, (8,))
    export((module, nn.CrossEntropyLoss(), Reshaped(module.parameters(), 0.1), data), tmp_path / "step.onnx")
    assert (tmp_path / "step.onnx").exists()  # a difference is refused, and no file is written


class Sized(torch.nn.Module):
    """Its buffer is made for the rows of the first batch."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("scale", torch.zeros(1), persistent=False)

    def forward(self, x):
        if len(self.scale) != len(x):
            self.scale = torch.linspace(1, 2, len(x))
        return self.inner(x) * self.scale[:, None]


@pytest.mark.parametrize("called", [False, True])
def test_a_buffer_made_by_the_first_batch_is_there_behind_a_call(called, tmp_path):
    module = Sized()
    if called:
        module(batch()["x"])
    made = module, plain, torch.optim.SGD(module.parameters(), 0.1), batch()
    if called:
        export(made, tmp_path / "step.onnx")
        return
    with pytest.raises(UnsupportedError, match=r"module changes the shape of its buffer 'scale': \[1\]") as refused:
        export(made, tmp_path / "step.onnx")
    assert "call the module once" in " ".join(refused.value.hints)


def test_a_permutation_is_an_input(tmp_path):
    def mixed(module, given):
        order = torch.randperm(4)
        return plain(module, given) + F.cross_entropy(module(given["x"]), given["y"][order])

    assert "draw_0" in export(step(mixed), tmp_path / "step.onnx").inputs


class Carried(nn.Module):
    """A tensor that is no buffer: so slow that three steps hardly show it."""

    def __init__(self):
        super().__init__()
        self.inner, self.mean = net(), torch.zeros(3)

    def forward(self, x):
        found = self.inner(x)
        old = self.mean
        self.mean = 0.9999 * old + 1e-4 * found.detach().mean(0)
        return found - self.mean


def test_a_tensor_that_a_module_carries_without_a_buffer_is_refused_with_its_line(tmp_path):
    words = r"carries a tensor .*'module Carried, mean', read in test_training_code.py, line \d+: self.mean = 0.9999"
    with pytest.raises(UnsupportedError, match=words):
        export(step(plain, Carried()), tmp_path / "step.onnx")


@pytest.mark.parametrize("kind", ["tensor", "module"])
def test_a_tensor_that_a_closure_carries_is_refused(kind, tmp_path):
    held = torch.zeros(()) if kind == "tensor" else nn.Linear(1, 1, bias=False)

    def loss(module, given):
        with torch.no_grad():
            value = held if kind == "tensor" else held.weight
            value.add_(1)
        return plain(module, given) * (1 - torch.exp(-9 * value.sum()))

    with pytest.raises(UnsupportedError, match="closure of loss, held"):
        export(step(loss), tmp_path / "step.onnx")


def test_a_result_that_a_module_keeps_and_a_frozen_teacher_in_a_closure_are_not_carried(tmp_path):
    teacher = net().requires_grad_(False)

    def loss(module, given):
        module.kept = module(given["x"])
        return plain(module, given) + (module.kept - teacher(given["x"])).square().mean()

    assert export(step(loss), tmp_path / "step.onnx").checked


def test_code_that_raises_for_some_values_is_an_assumption(tmp_path):
    def loss(module, given):
        found = plain(module, given)
        if torch.isnan(found):
            raise ValueError("not a number")
        assert torch.isfinite(found).all() and not found < 0
        return found

    notes = export(step(loss), tmp_path / "step.onnx").notes
    assert (
        sum("holds for the values at which no error is raised in test_training_code.py" in each for each in notes) == 2
    )


def test_code_that_catches_what_it_raises_is_a_branch(tmp_path):
    def loss(module, given):
        found = plain(module, given)
        try:
            if found > 9:
                raise ValueError("large")
        except ValueError:
            return found * 2
        return found

    with pytest.raises(UnsupportedError, match="branches on a value"):
        export(step(loss), tmp_path / "step.onnx")


def test_a_scalar_parameter_under_a_fused_optimizer(tmp_path):
    """The kernel reads the counts of steps, which are scalars too; the moments of the parameter are not counts."""
    module = net()
    module.scale = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.AdamW(module.parameters(), 0.01, fused=True)
    made = module, lambda module, given: plain(module, given) * module.scale, optimizer, batch()
    assert export(made, tmp_path / "step.onnx").checked


class Assigning(torch.optim.Optimizer):
    """Puts another tensor in the place of a parameter's memory."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            each.data = each.data - self.param_groups[0]["lr"] * each.grad


def test_an_assignment_to_data_is_an_update(tmp_path):
    module = net()
    assert export((module, plain, Assigning(module.parameters()), batch()), tmp_path / "step.onnx").checked


def test_a_tensor_that_stands_twice_in_a_batch_is_two_inputs(tmp_path):
    module, words = nn.Embedding(5, 5), torch.randint(0, 5, (4,))
    made = module, lambda module, given: F.cross_entropy(module(given["ids"]), given["labels"])
    found = export(
        (*made, torch.optim.SGD(module.parameters(), 0.1), {"ids": words, "labels": words}), tmp_path / "s.onnx"
    )
    assert {"ids", "labels"} <= set(found.inputs)


def test_a_batch_may_have_none_and_flags_beside_tensors(tmp_path):
    def loss(module, given):
        return plain(module, given) * (2 if given["mask"] is None and given["twice"] else 1)

    module = net()
    made = module, loss, torch.optim.SGD(module.parameters(), 0.1)
    found = export((*made, {**batch(), "mask": None, "twice": True}), tmp_path / "step.onnx")
    assert set(found.inputs) == {"x", "y", "lr"}
    with pytest.raises(InputError, match="'count' is not a tensor, but int"):
        export((*made, {**batch(), "count": 4}), tmp_path / "other.onnx")


class Following(nn.Module):
    """Its teacher has the name that gopt gives to a moving average of ``weight``."""

    def __init__(self):
        super().__init__()
        self.inner, self.weight = net(), nn.Parameter(torch.ones(()))
        self.ema = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x):
        return self.inner(x) * self.weight + self.ema.weight


def test_a_part_of_the_module_called_as_a_moving_average_is_refused(tmp_path):
    made = step(plain, Following())
    with pytest.raises(InputError, match=r"two values of the step have the name 'ema\.weight'"):
        export(made, tmp_path / "step.onnx", options=ExportOptions(ema=0.9))


@pytest.mark.parametrize("name", ["loss", "lr", "w_out"])
def test_names_of_other_values_of_the_step_are_refused(name, tmp_path):
    module = net()
    module.w = nn.Parameter(torch.ones(()))
    module.register_parameter(name, nn.Parameter(torch.ones(())))
    made = module, lambda module, given: plain(module, given) * module.w, torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(InputError, match=f"two values of the step have the name '{name}'"):
        export((*made, batch()), tmp_path / "step.onnx")


def test_values_that_are_no_numbers_confirm_nothing(tmp_path):
    def loss(module, given):
        return plain(module, given) + (module(given["x"]) * 0).sum().sqrt()  # its gradient is infinity times zero

    for check in (1, 3):
        with pytest.raises(UnsupportedError, match=r"'0\.weight' of eager PyTorch is not a number after step 1"):
            export(step(loss), tmp_path / "step.onnx", options=ExportOptions(check=check))


def test_batches_that_are_compared_stay_between_zero_and_one(tmp_path):
    def loss(module, given):
        return plain(module, {**given, "x": (1 - given["x"]).sqrt()})

    made = step(loss)
    made[3]["x"].uniform_(0.9, 1)
    assert export(made, tmp_path / "step.onnx").checked


def test_a_distribution_draws_inputs(tmp_path):
    def loss(module, given):
        mean, width = module(given["x"])[:, :1], module(given["x"])[:, 1:2].exp()
        drawn = torch.distributions.Normal(mean, width)
        return (
            drawn.rsample().square().mean()
            + torch.distributions.kl_divergence(drawn, torch.distributions.Normal(0.0, 1.0)).mean()
        )

    assert "draw_0" in export(step(loss), tmp_path / "step.onnx").inputs


class Masked(nn.Module):
    """PyTorch's encoder asks of a mask whether it is the causal one."""

    def __init__(self, made):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.made = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), made
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))

    def forward(self, x):
        mask = {
            "a buffer": lambda: self.mask,
            "made in the forward": lambda: torch.log(torch.tril(torch.ones(5, 5))),
            "of the data": lambda: self.mask + x.mean(),
        }[self.made]()
        return self.encoder(x, mask=mask).mean()


@pytest.mark.parametrize("made", ["a buffer", "made in the forward", "of the data"])
def test_code_may_ask_for_values_that_are_the_same_in_every_step(made, tmp_path):
    torch.manual_seed(0)
    net = Masked(made)
    recipe = (net, None, torch.optim.SGD(net.parameters(), 0.1), {"x": torch.randn(3, 5, 8)})
    if made == "of the data":
        with pytest.raises(UnsupportedError, match="branches on a value that the graph computes"):
            export(recipe, tmp_path / "step.onnx")
    else:
        assert export(recipe, tmp_path / "step.onnx").checked is not None
