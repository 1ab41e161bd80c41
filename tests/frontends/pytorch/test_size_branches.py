"""What a step does with the number of samples: branches, numbers of Python, inputs with samples. By hand,
``pytest -m torch``."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.convert import quiet  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.factory import make_recipe  # noqa: E402
from gopt.frontends.pytorch.options import Dynamic, ExportOptions  # noqa: E402
from gopt.frontends.pytorch.size_branches import inputs_with_samples, refuse_branches  # noqa: E402

COMPARED = (8, 2, 67)


class Head(nn.Linear):
    def __init__(self, form):
        super().__init__(6, 4)
        self.form = form

    def forward(self, x):
        return self.form(super().forward(x), x)


def step_of(form):
    net = Head(form)
    return net, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), recipes.batch(8, 6)


def uses_of(step, size=11):
    recipe = make_recipe(step)
    with quiet():
        sampled = inputs_with_samples(recipe, ExportOptions())
        return sampled, refuse_branches(recipe, ExportOptions(), size, sampled, COMPARED)


BRANCHES = {
    "many": lambda h, x: h * 2 if x.shape[0] > 1000 else h,
    "size": lambda h, x: h * 2 if x.size(0) > 100 else h,
    "len": lambda h, x: h * 2 if len(x) > 100 else h,
    "elements": lambda h, x: h * 2 if x.numel() > 6000 else h,
    "multiple": lambda h, x: h * 2 if x.shape[0] % 128 == 0 else h,
    "one size": lambda h, x: h * 2 if x.shape[0] in (1000, 2000) else h,
    "shape": lambda h, x: h * 2 if x.shape == (1000, 6) else h,
    "between": lambda h, x: h * 2 if (x.shape[0] > 500) & (x.shape[0] < 600) else h,
    "least": lambda h, x: h * min(x.shape[0], 1000),
    "least of torch": lambda h, x: h * torch.sym_min(x.shape[0], 1000),
    "quotient": lambda h, x: h * (1 + x.shape[0] // 128),
    "shifted": lambda h, x: h * (1 + (x.shape[0] >> 7)),
    "first rows": lambda h, x: h + h[:1000].sum(),
    "last rows": lambda h, x: h + h[-100:].sum(),
    "pieces": lambda h, x: torch.cat([each * (i + 1) for i, each in enumerate(h.split(1000))]),
    "chosen": lambda h, x: h * torch.sym_ite(x.shape[0] > 1000, 2, 1),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_that_parts_none_of_the_compared_sizes_is_refused_with_its_line(name):
    with pytest.raises(UnsupportedError, match=rf"a branch on the number of samples.* in test_size_branches.*{name}"):
        uses_of(step_of(BRANCHES[name]))


PLAIN = {
    "nothing": lambda h, x: h,
    "mean": lambda h, x: h / x.shape[0] + h.mean(0),
    "length": lambda h, x: h / len(x),
    "rows": lambda h, x: h + torch.arange(x.shape[0])[:, None],
    "view": lambda h, x: h.view(x.shape[0], 2, 2).flatten(1),
    "pairs": lambda h, x: (h @ h.T) @ h,
    "sum over pairs": lambda h, x: torch.einsum("ij,kj->ik", h, h) @ h,
    "moved": lambda h, x: h.roll(1, 0).flip(0),
    "order": lambda h, x: h.sort(0)[0].cumsum(0),
    "lower": lambda h, x: torch.tril(torch.ones(x.shape[0], x.shape[0])) @ h,
    "one": lambda h, x: h if x.shape[0] != 1 else h[0][None],
    "a compared size": lambda h, x: h if x.shape[0] != 67 else h.clone(),
}


@pytest.mark.parametrize("name", PLAIN)
def test_arithmetic_with_the_size_is_no_branch(name):
    sampled, uses = uses_of(step_of(PLAIN[name]))
    assert [*sampled] == ["x", "target"] and not uses.numbers and not uses.failed


STEPS = ("convolution 2d", "batch norm", "tied", "lstm", "bags, mean", "dropout", "checkpoint")


@pytest.mark.parametrize("name", STEPS)
def test_layers_of_pytorch_branch_on_no_size(name):
    _, uses = uses_of(recipes.STEPS[name](), 23)
    assert not uses.branches and not uses.numbers and not uses.failed


def test_a_number_of_python_is_named_and_what_torch_cannot_follow_too():
    _, uses = uses_of(step_of(lambda h, x: h / math.sqrt(x.shape[0])))
    assert "math.sqrt" in next(iter(uses.numbers)) and not uses.failed
    for form in (str, repr, "{}".format, lambda n: f"{n}"):
        _, uses = uses_of(step_of(lambda h, x, form=form: h * (2.0 if form(x.shape[0]) == "1000" else 1.0)))
        assert "test_size_branches.py" in next(iter(uses.numbers)) and not uses.failed
    _, uses = uses_of(step_of(lambda h, x: h * {1000: 2.0}.get(x.shape[0], 1.0)))
    assert uses.failed.startswith("TypeError")


class OtherSizeError(Exception):
    """What code may raise of its own."""


def _refused(h, x):
    if x.shape[0] > 10:
        raise OtherSizeError("too many")
    return h


UNFOLLOWED = {
    "TypeError": lambda h, x: h * {1000: 2.0}.get(x.shape[0], 1.0),
    "RuntimeError": lambda h, x: h * float(h.detach().numpy().sum() * 0 + 1),
    "OtherSizeError": _refused,
}


@pytest.mark.parametrize("kind", UNFOLLOWED)
def test_errors_of_torch_and_of_the_step_are_told(kind):
    _, uses = uses_of(step_of(UNFOLLOWED[kind]))
    assert uses.failed.startswith(kind), uses.failed


def test_a_defect_of_gopt_is_raised(monkeypatch):
    monkeypatch.setattr("gopt.frontends.pytorch.size_branches._holds_elsewhere", None)
    with pytest.raises(TypeError, match="not callable"):
        uses_of(step_of(PLAIN["a compared size"]))


class Weighted(nn.Linear):
    """Class weights, positions and rows that code takes by number, beside the samples."""

    def forward(self, x, y, weights, offset, mask):
        scores = super().forward(x) + offset[:, None].mean()
        rows = torch.arange(x.shape[0])
        return F.cross_entropy(scores * mask[rows][:, None], y, weights)


def weighted(rows, offsets):
    net = Weighted(6, 4)
    x, y = recipes.batch(rows, 6)
    batch = {"x": x, "y": y, "weights": torch.rand(4), "offset": torch.rand(offsets), "mask": torch.rand(rows)}
    return net, None, torch.optim.SGD(net.parameters(), 0.1), batch


def test_inputs_of_as_many_rows_by_chance_have_no_samples():
    """There are four classes, four samples, and a row of the mask for each sample."""
    with quiet():
        assert tuple(inputs_with_samples(make_recipe(weighted(4, 3)), ExportOptions())) == ("x", "y", "mask")
        with pytest.raises(UnsupportedError, match=r"'x' and 'offset' have 4 rows each.*do both have the samples"):
            inputs_with_samples(make_recipe(weighted(4, 4)), ExportOptions())


def test_an_export_has_the_samples_open_alone_and_says_that_no_code_branches(tmp_path):
    found = export(weighted(4, 3), tmp_path / "step.onnx", options=ExportOptions(dynamic=Dynamic.BATCH))
    import gopt

    inputs = gopt.load(found.model).training.graph.inputs
    assert [inputs[name].shape[0] for name in ("x", "y", "weights", "offset", "mask")] == [
        "batch", "batch", 4, 3, "batch",
    ]  # fmt: skip
    assert any(note.endswith("no code branches on the size") for note in found.notes)


def test_an_export_with_a_branch_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UnsupportedError, match="--dynamic batch: the step takes a branch"):
        export(step_of(BRANCHES["multiple"]), tmp_path / "step.onnx", options=ExportOptions(dynamic=Dynamic.BATCH))
    assert not list(tmp_path.iterdir())
