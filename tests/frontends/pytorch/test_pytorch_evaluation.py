"""``gopt export --eval``: the forward in evaluation mode, beside the step. By hand, ``pytest -m torch``."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import onnx  # noqa: E402
import onnxruntime  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402

EVALUATED = ExportOptions(evaluation=True, check=1)


def step(loss=None, samples=6):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 3))

    def measured(module, batch):
        out = module(batch["x"])
        return {"loss": F.cross_entropy(out, batch["y"]), "accuracy": (out.argmax(-1) == batch["y"]).float().mean()}

    batch = {"x": torch.randn(samples, 5), "y": torch.randint(0, 3, (samples,))}
    return net, loss or measured, torch.optim.AdamW(net.parameters(), 0.02), batch


def evaluated(net, batch):
    net.eval()
    with torch.no_grad():
        out = net(torch.from_numpy(batch["x"]))
    y = torch.from_numpy(batch["y"])
    return [float(F.cross_entropy(out, y)), float((out.argmax(-1) == y).float().mean())]


def samples(count, seed=3):
    random = np.random.default_rng(seed)
    return {"x": random.standard_normal((count, 5)).astype("f4"), "y": random.integers(0, 3, count)}


def test_a_loss_that_is_a_module_leaves_nothing_in_training_mode(tmp_path):
    """Of ``nn.CrossEntropyLoss()`` dropout drew numbers, and BatchNorm took the statistics of the batch."""
    net, _, optimizer, batch = step()
    found = export(
        (net, nn.CrossEntropyLoss(), optimizer, tuple(batch.values())), tmp_path / "s.onnx", options=EVALUATED
    )
    session = onnxruntime.InferenceSession(found.evaluation)
    for count in (6, 33):
        given = samples(count)
        loss = session.run(["loss"], {"input": given["x"], "target": given["y"]})[0]
        np.testing.assert_allclose(loss, evaluated(step()[0], given)[0], rtol=1e-5)
    assert net.training


def test_the_model_computes_what_the_module_does_in_evaluation(tmp_path):
    found = export(step(), tmp_path / "step.onnx", options=EVALUATED)
    assert found.evaluation == str(tmp_path / "step.eval.onnx") and found.metrics == ("loss", "accuracy")
    states = {each.tensor for each in gopt.load(found.model).training.states}
    inputs = {each.name for each in onnx.load(found.evaluation).graph.input}
    assert inputs - {"x", "y"} <= states and "1.running_var" in inputs
    session = onnxruntime.InferenceSession(found.evaluation)
    for count in (1, 6, 33):
        batch = samples(count)
        np.testing.assert_allclose(session.run(None, batch), evaluated(step()[0], batch), rtol=1e-5)


def test_a_run_evaluates_what_pytorch_does_with_its_checkpoint(tmp_path):
    found = export(step(), tmp_path / "step.onnx", options=EVALUATED)
    held = samples(20)
    folder = tmp_path / "ranks"
    gopt.shard(found.model, 2, stage=3).write(folder)
    run = gopt.run(
        folder, samples(48, 4), 5, eval=found.evaluation, eval_data=held, eval_every=2, keep_best="accuracy:max"
    )
    net = step()[0]
    values = run.states
    net.load_state_dict({name: torch.from_numpy(values[name]) for name in net.state_dict() if name in values}, False)
    np.testing.assert_allclose([*run.evaluations[5].values.values()], evaluated(net, held), rtol=1e-5)


def by_size(module, batch):
    return module(batch["x"]).square().mean() * (2 if len(batch["x"]) > 100 else 1)


def noisy(module, batch):
    return (module(batch["x"]) + torch.randn(len(batch["x"]), 3)).square().mean()


def test_code_that_branches_on_the_size_holds_for_the_examples(tmp_path):
    found = export(step(by_size), tmp_path / "step.onnx", options=EVALUATED)
    assert any("holds for the example's number of samples alone" in each for each in found.notes)
    assert onnx.load(found.evaluation).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 6


def test_random_numbers_in_evaluation_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(UnsupportedError, match="draws random numbers in evaluation mode"):
        export(step(noisy), tmp_path / "step.onnx", options=EVALUATED)
    assert [*tmp_path.iterdir()] == []
