"""Every optimizer of ``torch.optim`` with each of its flags against eager PyTorch. By hand, ``pytest -m torch``."""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402

STEPS = 6
MAKERS = {
    name: each
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and each is not torch.optim.Optimizer
}
FLAGS = {
    "foreach": [True], "fused": [True], "capturable": [True], "differentiable": [True], "maximize": [True],
    "amsgrad": [True], "centered": [True], "momentum": [0.9], "weight_decay": [0.1], "decoupled_weight_decay": [True],
    "nesterov": [True], "dampening": [0.3], "lr": [torch.tensor(0.01)], "lr_decay": [0.1], "momentum_decay": [0.1],
    "betas": [(0.7, 0.9), (torch.tensor(0.8), torch.tensor(0.95))], "initial_accumulator_value": [0.5], "t0": [2.0],
    "lambd": [0.1], "etas": [(0.3, 1.5)], "step_sizes": [(1e-4, 0.1)], "beta2_decay": [-0.5], "d": [1.5], "rho": [0.5],
    "alpha": [0.5], "ns_steps": [3], "adjust_lr_fn": ["match_rms_adamw"],
}  # fmt: skip
BESIDE = {
    "nesterov": {"momentum": 0.9}, "dampening": {"momentum": 0.9}, "lr": {"weight_decay": 0.1},
    "decoupled_weight_decay": {"weight_decay": 0.1}, "centered": {"momentum": 0.5},
}  # fmt: skip
"""What a flag needs to make a difference."""
ALONE = {"foreach", "fused", "capturable", "differentiable", "nesterov", "dampening"}
"""Flags that do not go together with all others."""


def _cases():
    for name, maker in MAKERS.items():
        known = inspect.signature(maker).parameters
        own = {flag: values for flag, values in FLAGS.items() if flag in known}
        yield name, {}
        for flag, values in own.items():
            beside = {key: value for key, value in BESIDE.get(flag, {}).items() if key in known}
            for value in values:
                yield name, beside | {flag: value}
        together = {flag: values[0] for flag, values in own.items() if flag not in ALONE}
        yield name, together
        for flag in ("foreach", "fused"):
            if flag in own:
                yield name, {key: value for key, value in together.items() if key != "lr"} | {flag: True}


CASES = list(_cases())
IDS = [f"{name} {' '.join(options) or 'plain'} {place}" for place, (name, options) in enumerate(CASES)]


def _step(name, options):
    torch.manual_seed(0)
    bias = name != "Muon"  # it takes matrices alone
    net = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=bias), torch.nn.Tanh(), torch.nn.Linear(4, 2, bias=bias))
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    optimizer = MAKERS[name](net.parameters(), **copied)
    return net, torch.nn.functional.cross_entropy, optimizer, (torch.randn(4, 3), torch.randint(0, 2, (4,)))


def _eager_takes(name, options):
    try:
        net, loss, optimizer, (x, y) = _step(name, options)
        loss(net(x), y).backward()
        optimizer.step()
    except Exception:  # sparse gradients, closures, flags for a GPU
        return False
    return True


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_every_flag_that_eager_pytorch_takes_agrees_with_it(name, options, tmp_path):
    if not _eager_takes(name, options):
        with pytest.raises((UnsupportedError, RuntimeError, ValueError, AssertionError, TypeError)):
            export(_step(name, options), tmp_path / "step.onnx", options=ExportOptions(check=STEPS))
        assert not list(tmp_path.iterdir())
        return
    found = export(_step(name, options), tmp_path / "step.onnx", options=ExportOptions(check=STEPS))
    assert len(set(found.checked.losses)) == STEPS, "a loss that stands still shows nothing"


def test_what_eager_pytorch_refuses_is_two_optimizers_and_flags_of_gpus():
    refused = {
        name if not options else next(flag for flag in ("capturable", "differentiable") if flag in options)
        for name, options in CASES
        if name not in ("LBFGS", "SparseAdam") and not _eager_takes(name, options)
    }
    assert refused <= {"capturable", "differentiable"}
    assert not any(_eager_takes(name, {}) for name in ("LBFGS", "SparseAdam"))
