"""Checkpoints as files of ``torch.save``: modules and optimizers load them strictly, and go on as gopt does. By hand,
``pytest -m torch``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from eager_beside import assert_goes_on, loaded, trained  # noqa: E402
from gopt.cli.main import main  # noqa: E402
from helpers import FIXTURES  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import OptionError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402

ROWS, RANKS = 4, 2


class Net(nn.Module):
    """Tied, frozen, unread and equal parameters; a mask, a counter that no step changes, and a table that is not kept.
    ``form``: dropout and BatchNorm, whose numbers depend on the ranks, between them."""

    def __init__(self, *form):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.frozen, self.unread = nn.Linear(8, 8), nn.Linear(8, 300)
        self.same = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.same[1].load_state_dict(self.same[0].state_dict())
        for each in (self.frozen, self.unread, self.same):
            each.requires_grad_(False)
        self.form, self.norm = nn.Sequential(*form), nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("version", torch.tensor(3))
        self.register_buffer("rope", torch.arange(32.0).reshape(4, 8) / 32, persistent=False)

    def forward(self, ids):
        x = self.words(ids) + self.rope
        x = self.frozen(x) + torch.tanh(self.same[0](x)) * self.same[1](x)
        x = self.mask / self.mask.sum(1, keepdim=True) @ x
        logits = self.head(self.norm(self.form(x)))
        return logits


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def recipe(optimizer, *form, schedule=lambda optimizer: None):
    def make():
        torch.manual_seed(7)  # what is frozen is the same in each recipe
        net = Net(*[make() for make in form])
        made = optimizer([each for each in net.parameters() if each.requires_grad])
        batch = (torch.randint(0, 12, (ROWS, 4)), torch.randint(0, 12, (ROWS, 4)))
        scheduler = schedule(made)
        return (net, loss, made, batch) if scheduler is None else (net, loss, made, batch, scheduler)

    return make


def halves(parameters):
    """Two groups in another order than that of the module."""
    flat = [each for each in parameters if each.ndim == 1]
    rest = [each for each in parameters if each.ndim > 1]
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": rest}], 1e-2, amsgrad=True)


def both(parameters):
    return [torch.optim.SGD(parameters[1:], 0.1, momentum=0.9), torch.optim.Adam(parameters[:1], 1e-2)]


TRAINED = {
    "groups": recipe(halves),
    "momentum": recipe(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    "dampening": recipe(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3)),
    "rmsprop": recipe(lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True)),
    "adagrad": recipe(lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1)),
    "nadam": recipe(lambda p: torch.optim.NAdam(p, 1e-2)),
    "two": recipe(both),
    "cosine": recipe(
        lambda p: torch.optim.AdamW(p, 1e-2),
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8),
    ),
    "lambda": recipe(
        lambda p: torch.optim.AdamW(p, 1e-2),
        schedule=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5 if n < 2 else 1 / (n + 1)),
    ),
}


def data_of(steps):
    random = np.random.default_rng(0)
    return {name: random.integers(0, 12, (steps * ROWS * RANKS, 4)) for name in ("ids", "target")}


@pytest.mark.parametrize("name", TRAINED)
def test_training_goes_on_in_eager_pytorch_as_in_gopt(name, tmp_path):
    made = export(TRAINED[name], tmp_path / "step.onnx")
    gopt.shard(made.model, RANKS, stage=2).write(tmp_path / "ranks")
    assert_goes_on(TRAINED[name], tmp_path / "ranks", data_of(5), tmp_path)


def test_the_loaded_module_computes_what_the_inference_model_does(tmp_path):
    make = recipe(halves, lambda: nn.Dropout(0.2), lambda: nn.BatchNorm1d(4))
    made = export(make, tmp_path / "step.onnx", options=ExportOptions(outputs=True, ema=0.9))
    gopt.shard(made.model, RANKS).write(tmp_path / "ranks")
    kept = trained(tmp_path / "ranks", data_of(3), 3, tmp_path / "kept")
    assert main(["merge", str(kept), "--inference", "-o", str(tmp_path / "model.onnx")]) == 0
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["ids"], "no draws"
    ids = data_of(1)["ids"][:ROWS]
    (wanted,) = session.run(None, {"ids": ids})

    again, content = loaded(make, kept, tmp_path)
    assert again.module.form[1].num_batches_tracked == 3
    net = again.module.eval()
    with torch.no_grad():
        np.testing.assert_allclose(net(torch.from_numpy(ids)).numpy(), wanted, rtol=1e-4, atol=1e-5)
    assert content["ema"].keys() == content["model"].keys()
    assert not torch.equal(content["ema"]["head.weight"], content["model"]["head.weight"])
    assert torch.equal(content["ema"]["head.weight"], content["ema"]["words.weight"])
    net.load_state_dict(content["ema"], strict=True)

    from safetensors.torch import load_file

    for ending, load in (("safetensors", load_file), ("pt", torch.load)):
        file = tmp_path / f"module.{ending}"
        assert main(["merge", str(kept), "--state-dict", str(file)]) == 0
        found = load(file)
        net.load_state_dict(found, strict=True)
        assert all(torch.equal(value, found[name]) for name, value in content["model"].items())


def test_a_scaler_goes_on(tmp_path):
    make = recipe(lambda p: torch.optim.AdamW(p, 1e-2))
    made = export(make, tmp_path / "step.onnx", options=ExportOptions(loss_scale="dynamic"))
    content = loaded(make, Path(made.model), tmp_path)[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert content["scaler"].keys() == scaler.state_dict().keys()
    scaler.load_state_dict(content["scaler"])
    assert scaler.get_scale() == 65536.0 and content["step"] == 0


def test_a_state_dict_goes_into_a_step_by_all_of_its_names(tmp_path):
    make = recipe(halves)
    made = export(make, tmp_path / "step.onnx")
    net = make()[0]
    with torch.no_grad():
        for each in net.state_dict().values():
            each.add_(1)
    from safetensors.torch import save_file

    state = {name: value.clone() for name, value in net.state_dict().items()}
    save_file(state, tmp_path / "mine.safetensors")
    load = ["load-state", made.model, str(tmp_path / "mine.safetensors"), "-o", str(tmp_path / "warm.onnx")]
    assert main(load) == 0
    content = loaded(make, tmp_path / "warm.onnx", tmp_path)[1]
    assert all(torch.equal(value, content["model"][name]) for name, value in state.items())
    save_file(state | {"head.weight": state["head.weight"] + 1}, tmp_path / "mine.safetensors")
    assert main([*load, "--force"]) == 3, "a tied tensor has one value"


def test_a_file_without_steps_and_a_step_of_another_origin_are_refused(tmp_path):
    with pytest.raises(OptionError, match="does not say which optimizer its states are of"):
        gopt.save_state_dict(FIXTURES / "mlp_adamw.onnx", tmp_path / "all.pt", all_states=True)
    found = gopt.save_state_dict(FIXTURES / "mlp_adamw.onnx", tmp_path / "module.pt")
    assert len(torch.load(found.file, weights_only=True)) == found.tensors > 0
    made = export(
        recipe(halves, schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 50, cycle_momentum=False)),
        tmp_path / "step.onnx",
    )
    with pytest.raises(OptionError, match="does not say how many steps its values have behind them"):
        gopt.save_state_dict(made.model, tmp_path / "all.pt", all_states=True)
