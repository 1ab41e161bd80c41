"""``gopt export --dynamic batch``: one file for any number of samples. By hand, ``pytest -m torch``."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
import first_step_optimizers as special  # noqa: E402

import gopt  # noqa: E402
from gopt.analysis.coupling import CouplingKind, find_couplings  # noqa: E402
from gopt.analysis.coupling.samples_axis import samples_axis  # noqa: E402
from gopt.errors import InputError, OptionError, UnsupportedError  # noqa: E402
from gopt.frontends.pytorch import recorded_step  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import Dynamic, ExportOptions  # noqa: E402
from gopt.offline.inference.write import merge_inference  # noqa: E402
from gopt.runtime.reference_eval import evaluate  # noqa: E402

STEPS = {
    "mlp": recipes.with_optimizer(lambda p: torch.optim.AdamW(p, 0.01)), "dropout": recipes.dropout,
    "batch_norm": recipes.batch_norm, "groups": recipes.groups, "tied": recipes.tied, "lstm": recipes.lstm,
    "convolution": recipes.convolution(2, False, 2), "transposed": recipes.convolution(1, True),
}  # fmt: skip


def exported(factory, folder, **options):
    options = ExportOptions(dynamic=Dynamic.BATCH, **options)
    return export(factory, folder / "step.onnx", options=options)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_any_size_is_equal_and_shards(name, tmp_path):
    """The check compares the example's size; constants come from two others."""
    found = exported(STEPS[name], tmp_path)
    training = gopt.load(found.model).training
    fed = [training.graph.inputs[each] for each in training.batch]
    assert fed and all(each.shape[0] == "batch" for each in fed)
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=1).equal


class Words(torch.nn.Module):
    """Reads sequences with time in front, from states of the batch's own."""

    def __init__(self):
        super().__init__()
        self.rows, self.cells = torch.nn.Embedding(11, 6), torch.nn.LSTM(6, 8)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, ids, hidden):
        return self.head(self.cells(self.rows(ids), (hidden, hidden))[0])


def words(target):
    """Sequences of 5 ids, 3 samples; the targets lie in one dimension, or have the form of the ids."""

    def make():
        torch.manual_seed(0)
        net = Words()
        ids, hidden, labels = torch.randint(0, 11, (5, 3)), torch.randn(1, 3, 8), torch.randint(0, 11, (5, 3))
        return net, loss, torch.optim.SGD(net.parameters(), 0.1), (ids, hidden, labels.reshape(target))

    def loss(scores, labels):
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    return make


@pytest.mark.parametrize("target, shapes", [((5, 3), (5, "batch")), ((15,), ("5*batch",))])
def test_time_in_front_leaves_dimension_1_open(target, shapes, tmp_path):
    found = exported(words(target), tmp_path, evaluation=True)
    training = gopt.load(found.model).training
    assert [training.graph.inputs[name].shape for name in training.batch] == [
        (5, "batch"), (1, "batch", 8), shapes,
    ]  # fmt: skip
    coupled = {each.kind for each in find_couplings(training)}
    assert coupled <= {CouplingKind.WEIGHTED, CouplingKind.IGNORED} and samples_axis(training) == 1
    gopt.shard(found.model, 2).write(tmp_path / "ranks")
    random = np.random.default_rng(0)
    given = random.integers(0, 11, (4, 5, 7)), random.standard_normal((4, 1, 7, 8), np.float32)
    labels = random.integers(0, 11, (4, 35) if shapes == ("5*batch",) else (4, 5, 7))
    np.savez(tmp_path / "data.npz", **dict(zip(training.batch, (*given, labels), strict=True)))
    options = {"settings": {"lr": 0.1}, "eval": tmp_path / "step.eval.onnx", "eval_data": tmp_path / "data.npz"}
    result = gopt.run(tmp_path / "ranks", tmp_path / "data.npz", 2, batch_size=7, shuffle=0, **options)
    assert [step.samples for step in result.steps] == [14, 14] and result.steps[-1].evaluation.samples == 28
    with pytest.raises(InputError, match="its batch is"):
        gopt.run(tmp_path / "ranks", tmp_path / "data.npz", 2, batch_size=3, **options)


@pytest.mark.parametrize("size", [1, 5])
def test_its_gradient_is_that_of_eager_pytorch_at_a_size_that_no_trace_saw(size, tmp_path):
    net, loss, optimizer, _ = STEPS["mlp"]()
    found = exported((net, loss, optimizer, (torch.randn(8, 6), torch.randint(0, 4, (8,)))), tmp_path)
    graph = gopt.load(found.model).training.graph
    x, y = torch.randn(size, 6), torch.randint(0, 4, (size,))
    results = evaluate(graph, {"input": x.numpy(), "target": y.numpy(), "lr": np.float32(0.01)})
    expected = loss(net(x), y)
    np.testing.assert_allclose(results["loss"], expected.item(), rtol=1e-5)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(results[f"{name}_out"], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_its_inference_is_that_of_eager_pytorch_in_evaluation_mode_at_any_size(tmp_path):
    found = exported(recipes.batch_norm, tmp_path, outputs=True)
    graph = gopt.load(found.model).training.graph
    random = np.random.default_rng(0)
    running = [name for name in graph.initializers if name.endswith((".running_mean", ".running_var"))]
    shapes = {name: graph.initializers[name].type.dims for name in running}
    values = {name: random.uniform(0.5, 1.5, shape).astype(np.float32) for name, shape in shapes.items()}
    model = onnx.load(found.model)
    for each in model.graph.initializer:
        if each.name in values:
            each.CopyFrom(onnx.numpy_helper.from_array(values[each.name], each.name))
    onnx.save(model, tmp_path / "given.onnx")
    merge_inference(tmp_path / "given.onnx", tmp_path / "model.onnx")
    net, _, _, (x, *_) = recipes.batch_norm()
    recorded = {name: torch.tensor(graph.initializers[name].numpy()) for name in net.state_dict()}
    net.load_state_dict(recorded | {name: torch.tensor(value) for name, value in values.items()})
    net.eval()
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for size in (1, 5):
        fed = torch.randn(size, *x.shape[1:])
        (result,) = session.run(None, {session.get_inputs()[0].name: fed.numpy()})
        np.testing.assert_allclose(result, net(fed).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_code_that_computes_with_the_size_is_refused_by_its_node(tmp_path):
    class Squared(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.shape[0] ** 2)

    net = Squared(6, 4)
    step = (net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), recipes.batch(8, 6))
    with pytest.raises(UnsupportedError, match=r"holds for one size of the batch alone.*a known function of the size"):
        exported(step, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [8, 11, 13])
def test_the_check_runs_at_a_size_that_no_trace_saw(size, tmp_path):
    """The code is another one at the sizes that are traced where the example has 8 samples."""

    class Odd(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if x.shape[0] in (11, 13) else 3.0)

    net = Odd(6, 4)
    step = (net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), recipes.batch(size, 6))
    with pytest.raises(UnsupportedError, match=r"is not the eager one|takes a branch"):
        exported(step, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("chosen", [lambda n: n < 4, lambda n: n > 16], ids=["few", "many"])
def test_a_branch_on_few_or_many_samples_is_refused(chosen, tmp_path):
    class Branching(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if chosen(x.shape[0]) else 3.0)

    net = Branching(6, 4)
    step = (net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), recipes.batch(8, 6))
    with pytest.raises(UnsupportedError, match=r"takes a branch .* in test_dynamic_export.py, line \d+: return super"):
        exported(step, tmp_path)
    assert not list(tmp_path.iterdir())


def test_branches_are_looked_for_once_where_an_optimizer_is_traced_twice(tmp_path, monkeypatch):
    looked, look = [], recorded_step.refuse_branches
    monkeypatch.setattr(recorded_step, "refuse_branches", lambda *given: looked.append(1) or look(*given))
    traced, convert = [], recorded_step.RecordedStep.converted
    monkeypatch.setattr(
        recorded_step.RecordedStep, "converted", lambda step, *given: traced.append(step.way) or convert(step, *given)
    )
    net, loss, _, batch = recipes.with_optimizer(torch.optim.SGD)()
    found = exported((net, loss, special.InLists(net.parameters()), batch), tmp_path)
    assert len(traced) == 2 and len(looked) == 1
    assert any("no code branches on the size" in note for note in found.notes)


def test_a_batch_of_one_sample_and_options_that_cannot_be_combined_are_refused(tmp_path):
    net, loss, optimizer, _ = recipes.groups()
    with pytest.raises(OptionError, match="at least two samples"):
        exported((net, loss, optimizer, recipes.batch(1, 6)), tmp_path)
    with pytest.raises(OptionError, match="--dynamic cannot be combined with --no-values"):
        exported((net, loss, optimizer, recipes.batch(8, 6)), tmp_path, values=False)
