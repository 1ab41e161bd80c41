"""What a factory may return: several losses, modules that return tuples and dicts, nested batches. By hand,
``pytest -m torch``."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import InputError, UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
from gopt.runtime.reference_eval import evaluate  # noqa: E402


class Two(nn.Module):
    """Two heads and two losses. ``form``: what it returns, from losses and scores."""

    def __init__(self, form):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)
        self.form = form

    def forward(self, x, y, z):
        hidden = torch.tanh(self.body(x))
        one, two = self.first(hidden), self.second(hidden)[:, 0]
        return self.form(F.cross_entropy(one, y), F.mse_loss(two, z), one)


FORMS = {
    "dict": (
        lambda a, b, s: {"loss": a + 0.5 * b, "first": a, "second": b, "scores": s},
        ["first", "second", "scores"],
    ),
    "tuple": (lambda a, b, s: (a + 0.5 * b, a, b, s), ["output_1", "output_2", "output_3"]),
    "list": (lambda a, b, s: [a + 0.5 * b, s], ["output_1"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_several_losses_are_outputs_beside_their_sum(form, tmp_path):
    """The step follows the first one alone; new weights are those of its gradient in eager PyTorch."""
    make, names = FORMS[form]
    torch.manual_seed(0)
    net = Two(make)
    optimizers = [torch.optim.SGD([*net.body.parameters(), *net.first.parameters()], 0.1),
                  torch.optim.SGD(net.second.parameters(), 0.1)]  # fmt: skip
    batch = {"x": torch.randn(6, 6), "y": torch.randint(0, 4, (6,)), "z": torch.randn(6)}
    found = export((net, None, optimizers, batch), tmp_path / "step.onnx", options=ExportOptions(outputs=True))
    training = gopt.load(found.model).training
    assert training.loss == "loss"
    assert [name for name in training.graph.outputs if name != "loss" and not name.endswith("_out")] == names
    results = evaluate(
        training.graph, {**{name: value.numpy() for name, value in batch.items()}, "lr": np.float32(0.1)}
    )
    returned = net(**batch)
    values = list(returned.values() if isinstance(returned, dict) else returned)
    for name, value in zip(["loss", *names], values, strict=True):
        np.testing.assert_allclose(results[name], value.detach().numpy(), rtol=1e-5, atol=1e-6)
    values[0].backward()
    for name, each in net.named_parameters():
        np.testing.assert_allclose(results[f"{name}_out"], (each - 0.1 * each.grad).detach().numpy(), atol=1e-6)
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=1).equal


def nested():
    torch.manual_seed(0)
    net = nn.ModuleDict({"one": nn.Linear(3, 4), "two": nn.Linear(5, 4)})

    def loss(module, batch):
        assert type(batch["views"]) is list and type(batch["views"][1]) is tuple
        (first, (second, weight)), targets = batch["views"], batch["targets"]
        scores = module["one"](first) + module["two"](second) * weight[:, None]
        return F.cross_entropy(scores, targets["class"]) + F.mse_loss(scores.sum(1), targets["sum"])

    batch = {
        "views": [torch.randn(6, 3), (torch.randn(6, 5), torch.rand(6))],
        "targets": {"class": torch.randint(0, 4, (6,)), "sum": torch.randn(6)},
    }
    return net, loss, torch.optim.SGD(net.parameters(), 0.1), batch


def test_a_nested_batch_has_an_input_for_each_tensor(tmp_path):
    net, loss, optimizer, batch = nested()
    found = export((net, loss, optimizer, batch), tmp_path / "step.onnx")
    names = ("views.0", "views.1.0", "views.1.1", "targets.class", "targets.sum")
    assert found.inputs == (*names, "lr")
    first, (second, weight) = batch["views"]
    feeds = dict(zip(names, (first, second, weight, batch["targets"]["class"], batch["targets"]["sum"])))
    graph = gopt.load(found.model).training.graph
    results = evaluate(graph, {**{name: value.numpy() for name, value in feeds.items()}, "lr": np.float32(0.1)})
    expected = loss(net, batch)
    expected.backward()
    np.testing.assert_allclose(results["loss"], expected.item(), rtol=1e-5)
    for name, each in net.named_parameters():
        np.testing.assert_allclose(results[f"{name}_out"], (each - 0.1 * each.grad).detach().numpy(), atol=1e-6)
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=1).equal


def test_a_tuple_may_be_nested_too():
    class Sum(nn.Linear):
        def forward(self, pair):
            return super().forward(pair["a"] + pair["b"][0])

    net = Sum(3, 2)
    batch = ({"a": torch.ones(4, 3), "b": [torch.ones(4, 3)]}, torch.zeros(4, 2))
    recipe = make_recipe((net, F.mse_loss, torch.optim.SGD(net.parameters(), 0.1), batch))
    assert list(recipe.batch) == ["pair.a", "pair.b.0", "target"]
    assert recipe.loss_of(recipe.batch).item() == pytest.approx(net(batch[0]).square().mean().item())


def test_one_tensor_is_given_to_the_loss_with_the_module():
    """As (target,) it left the module without an input."""
    net, batch = nn.Linear(3, 3), torch.ones(4, 3)
    made = (net, lambda module, x: F.mse_loss(module(x), x), torch.optim.SGD(net.parameters(), 0.1), batch)
    recipe = make_recipe(made)
    assert list(recipe.batch) == ["input"] and recipe.loss_of(recipe.batch).item() == made[1](net, batch).item()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": [torch.ones(2), 3]}, r"'x\.1' is not a tensor, but int"),
        ({"x": [torch.ones(2)], "x.0": torch.ones(2)}, r"has 'x\.0' twice"),
        ({"weight": torch.ones(2)}, r"has 'weight', which the module has too"),
        ({"lr": torch.ones(2)}, r"has 'lr', a name that gopt uses itself"),
        ({"x": {"a": {1, 2}}}, r"'x\.a' is not a tensor, but set"),
    ],
)
def test_a_batch_that_makes_no_inputs_is_refused(batch, words):
    net = nn.Linear(2, 2)
    with pytest.raises(InputError, match=words):
        make_recipe((net, None, torch.optim.SGD(net.parameters(), 0.1), batch))


class Lit(nn.Linear):
    """As a module of Lightning: it makes its optimizer itself."""

    def configure_optimizers(self, form, interval="step"):
        optimizer = torch.optim.Adam(self.parameters())
        scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": interval}
        return {
            "a dict": {"optimizer": optimizer, "lr_scheduler": scheduler},
            "without a scheduler": {"optimizer": optimizer},
            "lists": ([optimizer], [scheduler]),
        }[form]


BATCH = (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("form", ["a dict", "without a scheduler", "lists"])
def test_takes_what_configure_optimizers_returns(form):
    net = Lit(3, 2)
    recipe = make_recipe((net, F.cross_entropy, net.configure_optimizers(form), BATCH))
    assert isinstance(recipe.optimizers[0], torch.optim.Adam) and len(recipe.optimizers) == 1
    assert (recipe.scheduler is None) == (form == "without a scheduler")


def test_a_scheduler_of_epochs_is_not_taken_for_one_of_steps():
    net = Lit(3, 2)
    with pytest.raises(UnsupportedError, match="once an epoch"):
        make_recipe((net, F.cross_entropy, net.configure_optimizers("lists", "epoch"), BATCH))


def test_a_loader_gives_its_first_batch():
    net, loader = nn.Linear(3, 2), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*BATCH), batch_size=2)
    recipe = make_recipe((net, F.cross_entropy, torch.optim.Adam(net.parameters()), loader))
    assert {name: len(value) for name, value in recipe.batch.items()} == {"input": 2, "target": 2}


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_inputs_of_a_wrapped_module_have_the_names_of_the_module_in_it(wrap):
    net = wrap(nn.Linear(3, 2))
    recipe = make_recipe((net, F.cross_entropy, torch.optim.Adam(net.parameters()), BATCH))
    assert list(recipe.batch) == ["input", "target"]


def test_a_module_on_ranks_of_its_own_is_refused_with_what_to_give():
    net = nn.Linear(3, 2)
    wrapped = object.__new__(nn.parallel.DistributedDataParallel)  # without a process group
    with pytest.raises(UnsupportedError, match="DistributedDataParallel") as raised:
        make_recipe((wrapped, F.cross_entropy, torch.optim.Adam(net.parameters()), BATCH))
    assert ".module" in raised.value.hints[0]


def test_several_modules_are_told_to_become_one():
    nets = nn.Linear(3, 2), nn.Linear(2, 2)
    with pytest.raises(InputError, match="is not a module, but tuple") as raised:
        make_recipe((nets, F.cross_entropy, torch.optim.Adam(nets[0].parameters()), BATCH))
    assert "ModuleDict" in raised.value.hints[0]


def test_a_loss_that_does_not_fit_says_how_it_is_called(tmp_path):
    net = nn.Linear(3, 2)
    recipe = (
        net,
        lambda module, batch: F.cross_entropy(module(batch[0]), batch[1]),
        torch.optim.Adam(net.parameters()),
    )
    with pytest.raises(
        UnsupportedError, match=r"the eager step raised .*, in test_factory.py, line .*: lambda"
    ) as raised:
        export((*recipe, BATCH), tmp_path / "step.onnx")
    assert "loss(module(*inputs), target)" in raised.value.hints[-1]
