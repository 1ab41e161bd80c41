"""``gopt export --outputs``: what the module returns, in the step and in a model for inference. By hand,
``pytest -m torch``."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
import onnxruntime  # noqa: E402
from gopt.cli.main import main  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
from gopt.runtime.reference_eval import evaluate  # noqa: E402


class Heads(nn.Module):
    """Two heads behind BatchNorm and dropout. ``form``: how their results are returned."""

    def __init__(self, form):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25))
        self.first, self.second, self.form = nn.Linear(8, 4), nn.Linear(8, 2), form

    def forward(self, x):
        hidden = self.body(x)
        return self.form(self.first(hidden), self.second(hidden), hidden)


FORMS = {
    "tensor": (lambda a, b, h: a, lambda out, y: F.cross_entropy(out, y), ["output"]),
    "tuple": (lambda a, b, h: (a, b), lambda out, y: F.cross_entropy(out[0], y) + out[1].square().mean(),
              ["output_0", "output_1"]),
    "dict": (lambda a, b, h: {"scores": a, "x": h, "count": 3}, lambda out, y: F.cross_entropy(out["scores"], y),
             ["scores", "output.x"]),
}  # fmt: skip


def step_of(form, calls=lambda net, x: net(x)):
    made, loss, names = FORMS[form]
    torch.manual_seed(1)
    net = Heads(made)
    x, y = recipes.batch(6, 6)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    return (net, lambda module, batch: loss(calls(module, batch["x"]), batch["y"]), optimizer, {"x": x, "y": y}), names


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_what_the_module_returns_in_the_step_and_evaluated(form, tmp_path):
    step, names = step_of(form)
    net, *_, batch = step
    found = export(step, tmp_path / "step.onnx", options=ExportOptions(outputs=True))
    graph = gopt.load(found.model).training.graph
    assert [name for name in graph.outputs if name != "loss" and not name.endswith("_out")] == names
    draw = graph.inputs["draw_0"].shape
    feeds = {name: value.numpy() for name, value in batch.items()}
    kept = np.zeros(draw, np.float32)  # below 1 - p: dropout keeps all, scaled
    results = evaluate(graph, {**feeds, "draw_0": kept, "lr": np.float32(0.01)})
    with torch.no_grad():
        hidden = net.body[:3](batch["x"]) / 0.75
        expected = net.form(net.first(hidden), net.second(hidden), hidden)
    for name, value in zip(names, values_of(expected)):
        np.testing.assert_allclose(results[name], value.numpy(), rtol=1e-4, atol=1e-5)

    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    data = {name: value.repeat(4, *[1] * (value.dim() - 1)).numpy() for name, value in batch.items()}
    random = np.random.default_rng(0).random((24, *draw[1:]), np.float32)
    trained = gopt.run(
        tmp_path / "ranks", {**data, "draw_0": random}, 2, settings={"lr": 0.01}, checkpoint=tmp_path / "ckpt"
    )
    assert main(["merge", str(trained.path), "--inference", "-o", str(tmp_path / "model.onnx")]) == 0
    assert main(["merge", str(trained.path), "--state-dict", str(tmp_path / "trained.safetensors")]) == 0
    from safetensors.torch import load_file

    before = net.first.weight.detach().clone()
    left = net.load_state_dict(load_file(tmp_path / "trained.safetensors"), strict=False)
    assert not left.unexpected_keys and not torch.equal(net.first.weight, before)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    answers = dict(zip([each.name for each in session.get_outputs()], session.run(None, {"x": feeds["x"]})))
    assert list(answers) == names
    with torch.no_grad():
        expected = net.eval()(batch["x"])
    for name, value in zip(names, values_of(expected)):
        np.testing.assert_allclose(answers[name], value.numpy(), rtol=1e-4, atol=1e-5)


def values_of(returned):
    """The tensors of what a module returned."""
    values = returned.values() if isinstance(returned, dict) else returned
    values = [returned] if isinstance(returned, torch.Tensor) else values
    return [each for each in values if isinstance(each, torch.Tensor)]


def test_a_module_that_is_called_twice_or_returns_its_loss_alone_is_refused(tmp_path):
    step, _ = step_of("tensor", lambda net, x: net(x) + net(x))
    with pytest.raises(UnsupportedError, match="--outputs: the module is called 2 times in a step"):
        export(step, tmp_path / "step.onnx", options=ExportOptions(outputs=True))
    with pytest.raises(UnsupportedError, match="--outputs: the module returns no tensor beside the loss"):
        export(recipes.tied, tmp_path / "step.onnx", options=ExportOptions(outputs=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("added", [1e-3, np.nan, np.inf])
def test_the_check_sees_a_wrong_output(added, tmp_path, monkeypatch):
    from gopt.frontends.pytorch import check

    run = check.Executor.run

    def planted(self, feeds, *call):
        found = run(self, feeds, *call)
        found["output_1"].flat[0] += added
        return found

    monkeypatch.setattr(check.Executor, "run", planted)
    with pytest.raises(UnsupportedError, match=r"'output_1' after step 1"):
        export(step_of("tuple")[0], tmp_path / "step.onnx", options=ExportOptions(outputs=True))
    assert not list(tmp_path.iterdir())


class Scores(nn.Linear):
    """Returns a value that has no ONNX form and that the loss does not read."""

    def forward(self, x):
        logits = super().forward(x)
        return logits, torch.special.i1e(logits)


def test_what_nobody_asked_for_may_have_no_onnx_form(tmp_path):
    net = Scores(6, 4)
    x, y = recipes.batch(6, 6)
    batch = {"x": x, "y": y}
    step = (net, lambda m, b: F.cross_entropy(m(b["x"])[0], b["y"]), torch.optim.SGD(net.parameters(), 0.1), batch)
    assert export(step, tmp_path / "step.onnx").checked.updates == 3
    with pytest.raises(UnsupportedError, match="has no ONNX form"):
        export(step, tmp_path / "other.onnx", options=ExportOptions(outputs=True))
