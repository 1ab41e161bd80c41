"""Operators that ONNX has otherwise or not at all: squeezes of several elements, and in bfloat16 convolutions and pools
under ``--autocast bf16``. By hand, ``pytest -m torch``."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
from torch import nn  # noqa: E402

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch import convert, decompositions  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import Autocast, ExportOptions  # noqa: E402

BF16 = ExportOptions(autocast=Autocast.BF16)


def pooled(pool):
    def factory():
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), pool, nn.Flatten(), nn.LazyLinear(4))
        x, y = recipes.batch(4, 3, 8, 8)
        net(x)
        return net, nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), (x, y)

    return factory


STEPS = {
    "1d": recipes.convolution(1, False), "2d in groups": recipes.convolution(2, False, 2),
    "3d": recipes.convolution(3, False), "transposed": recipes.convolution(2, True),
    "batch norm and maxima": recipes.batch_norm, "strided maxima": pooled(nn.MaxPool2d(3, 2, 1)),
    "all means": pooled(nn.AdaptiveAvgPool2d(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_a_convolution_in_bfloat16_is_that_of_eager_autocast(name, tmp_path):
    """Its loss is that of eager autocast to less than bfloat16 rounds, and is not that of float32."""
    found = export(STEPS[name], tmp_path / "step.onnx", options=BF16)
    wide = export(STEPS[name], tmp_path / "wide.onnx").checked
    mine, theirs = found.checked.losses[0], found.checked.eager_losses[0]
    assert mine != wide.losses[0] and theirs != wide.losses[0]
    assert abs(mine - theirs) <= 2.0**-10 * abs(theirs)
    model = onnx.load(found.model)
    to = [node.attribute[0].i for node in model.graph.node if node.op_type == "Cast"]
    assert to.count(onnx.TensorProto.BFLOAT16) >= 3, "inputs, weights and results are rounded"


@pytest.mark.parametrize("name", [name for name in STEPS if "batch norm" not in name])
def test_a_step_is_converted_at_once(name, tmp_path, monkeypatch):
    """What the exporter has no form for is decomposed before, but for the variances of a batch: it would take as long
    once more."""
    calls, own = [], convert._exported
    monkeypatch.setattr(convert, "_exported", lambda *given: calls.append(1) or own(*given))
    export(STEPS[name], tmp_path / "step.onnx")
    assert len(calls) == 1


SQUEEZES = {
    "all": lambda y: y[:, :1].squeeze(), "all of a new axis": lambda y: y.unsqueeze(0).squeeze().sum(1),
    "one of several elements": lambda y: y.squeeze(1).sum(-1), "several": lambda y: y[:, None].squeeze((0, -2)).sum(-1),
    "of a scalar": lambda y: y.sum().squeeze(-1) + y[:, 0],
}  # fmt: skip


@pytest.mark.parametrize("name", SQUEEZES)
def test_a_squeeze_leaves_dimensions_of_several_elements(name, tmp_path):
    """As PyTorch does, of one size and of any."""

    def factory():
        net = recipes.Shaped(SQUEEZES[name])
        return net, nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), (torch.randn(5, 4), torch.randn(5))

    export(factory, tmp_path / "step.onnx")
    export(factory, tmp_path / "open.onnx", options=ExportOptions(dynamic="batch"))


def test_the_rounding_of_a_convolution_is_that_of_bfloat16(tmp_path):
    """The new weights are nearer to those of autocast than to those of float32. Sums of the convolution's gradients are
    taken in float32 here, as oneDNN takes them: PyTorch's own kernels, on CPUs without instructions for bfloat16, round
    after each sample."""
    from gopt.ir.load import load
    from gopt.runtime.reference_eval import evaluate

    export(recipes.convolution(2, False), tmp_path / "step.onnx", options=BF16)
    torch.manual_seed(0)
    net, loss, optimizer, (x, y) = recipes.convolution(2, False)()
    graph = load(tmp_path / "step.onnx")
    results = evaluate(graph, {"input": x.numpy(), "target": y.numpy(), "lr": np.float32(0.1)})
    import copy

    def rounded(value):
        return value.bfloat16().float()

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, convolve, *operands):
            operands = (*map(rounded, operands),)
            ctx.save_for_backward(*operands)
            ctx.convolve = convolve
            return convolve(*operands).bfloat16()

        @staticmethod
        def backward(ctx, gradient):
            operands = [value.detach().requires_grad_() for value in ctx.saved_tensors]
            with torch.enable_grad():
                found = torch.autograd.grad(ctx.convolve(*operands), operands, gradient.float())
            return None, *map(rounded, found)

    def summed(layer):
        convolve = layer._conv_forward

        def alone(*operands):
            with torch.autocast("cpu", enabled=False):
                return convolve(*operands)

        layer._conv_forward = lambda *operands: Summed.apply(alone, *operands)

    def stepped(narrow):
        other, own = copy.deepcopy((net, optimizer))
        if narrow:
            summed(other[0])
            summed(other[2])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=narrow):
            value = loss(other(x), y)
        value.backward()
        own.step()
        return other[0].weight.detach().numpy()

    mine = results["0.weight_out"]
    near, far = (np.linalg.norm(mine - stepped(narrow)) for narrow in (True, False))
    assert near < far / 3, (near, far)


def test_another_operator_without_a_form_in_bfloat16_is_refused_by_name(tmp_path):
    class Best(nn.Linear):
        def forward(self, x):
            return super().forward(x).topk(4)[0]

    net = Best(6, 8)
    step = (net, nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), recipes.batch(8, 6))
    with pytest.raises(UnsupportedError, match=r"--autocast bf16: ONNX has no such operator in that type: .*TopK"):
        export(step, tmp_path / "step.onnx", options=BF16)
    assert not list(tmp_path.iterdir())


def test_diagonals_are_read_and_written(tmp_path):
    """PyTorch's own forms of them write in place."""
    net = nn.Linear(6, 4)

    def loss(module, given):
        found = module(given["x"])
        square = (found @ found.T).clone()
        square.diagonal(1).mul_(2)
        square.diagonal(-2).add_(1.0)
        wide = torch.diag_embed(found, 1) + torch.diag_embed(found, -1, 2, 1)
        return square.square().mean() + (wide * torch.arange(25.0).view(5, 5)).mean() + found.diagonal(1).sum()

    made = net, loss, torch.optim.SGD(net.parameters(), 0.1), {"x": torch.randn(5, 6)}
    assert export(made, tmp_path / "step.onnx").checked


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_an_interpolation_in_a_narrow_type_is_rounded_once(dtype):
    x, end = (torch.randn(4000, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    weight = torch.tensor(0.1, dtype=dtype)
    assert torch.equal(decompositions.lerp(x, end, 0.1), torch.lerp(x, end, 0.1))
    assert torch.equal(decompositions.lerp_by_tensor(x, end, weight), torch.lerp(x, end, weight))
    assert not torch.equal(x + 0.1 * (end - x), torch.lerp(x, end, 0.1)), "rounded three times"


class Turned(nn.Module):
    """A rotation by complex numbers, with a dimension put in ``dim``, as Llama 4 turns its heads."""

    def __init__(self, dim):
        super().__init__()
        self.net, self.dim = nn.Linear(6, 8), dim

    def forward(self, x):
        pairs = torch.view_as_complex(self.net(x).unflatten(-1, (4, 2)))
        angles = torch.polar(torch.ones_like(x[:, :4]), x[:, :4])
        turned = pairs.unsqueeze(self.dim) * angles.unsqueeze(self.dim)
        return torch.view_as_real(turned).flatten(1)


@pytest.mark.parametrize("dim", [1, -1, 0])
def test_a_dimension_is_put_into_complex_numbers(dim, tmp_path):
    def factory():
        torch.manual_seed(0)
        net = Turned(dim)
        loss = lambda y, target: ((y.reshape(target.shape) - target) ** 2).mean()  # noqa: E731
        return net, loss, torch.optim.SGD(net.parameters(), 0.1), (torch.randn(3, 6), torch.randn(3, 8))

    found = export(factory, tmp_path / "step.onnx").checked
    assert found.losses == pytest.approx(found.eager_losses, rel=1e-5)


class Repeated(nn.Module):
    """A rotation of several heads by complex numbers: one of both is repeated for all heads."""

    def __init__(self, angles_alone):
        super().__init__()
        self.net, self.angles_alone = nn.Linear(6, 8), angles_alone

    def forward(self, x):
        pairs = torch.view_as_complex(self.net(x).unflatten(-1, (1, 4, 2)))
        angles = torch.polar(torch.ones_like(x[:, :4]), x[:, :4]).unsqueeze(1).expand(-1, 3, 4)
        if not self.angles_alone:
            pairs = pairs.expand(x.shape[0], 3, -1)
        return torch.view_as_real(pairs * angles).flatten(1)


@pytest.mark.parametrize("angles_alone", [True, False])
def test_complex_numbers_are_repeated(angles_alone, tmp_path):
    def factory():
        torch.manual_seed(0)
        net, loss = Repeated(angles_alone), lambda y, target: ((y - target) ** 2).mean()
        return net, loss, torch.optim.SGD(net.parameters(), 0.1), (torch.randn(3, 6), torch.randn(3, 24))

    found = export(factory, tmp_path / "step.onnx").checked
    assert found.losses == pytest.approx(found.eager_losses, rel=1e-5)
