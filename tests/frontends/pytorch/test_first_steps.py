"""Optimizers with a first step of their own, and what else an eager step shows. By hand, ``pytest -m torch``."""

from __future__ import annotations

import onnx
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
import first_step_optimizers as special  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch import check, optimizer_runs  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import Autocast, ExportOptions  # noqa: E402

STEPS = 8


def exported(maker, folder, **options):
    return export(
        recipes.with_optimizer(maker), folder / "step.onnx", options=ExportOptions(**{"check": STEPS} | options)
    )


def inputs_of(found):
    return {each.name for each in onnx.load(found.model).graph.input}


def dampened(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.3)


@pytest.mark.parametrize("maker", [dampened, special.Difference, special.Centered], ids=lambda each: each.__name__)
def test_a_first_step_of_its_own_is_traced_apart(maker, tmp_path):
    found = exported(maker, tmp_path)
    assert "optimizer0.started" in inputs_of(found)
    gopt.shard(gopt.load(found.model), 2)


def test_without_the_second_trace_the_check_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr("gopt.frontends.pytorch.recorded_step.first_steps_apart", lambda *_: frozenset())
    with pytest.raises(UnsupportedError, match="not the eager one"):
        exported(dampened, tmp_path)


def test_a_stored_gradient_is_not_that_of_the_example(tmp_path, monkeypatch):
    """Behind another first batch than the example, which the check begins with."""
    made = check.batches
    monkeypatch.setattr(check, "batches", lambda recipe, count: made(recipe, count + 1)[1:])
    exported(special.Difference, tmp_path)
    monkeypatch.setattr("gopt.frontends.pytorch.recorded_step.first_steps_apart", lambda *_: frozenset())
    with pytest.raises(UnsupportedError, match="not the eager one"):
        exported(special.Difference, tmp_path / "other")


@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
def test_a_first_step_and_a_loss_scale(scale, tmp_path):
    assert "optimizer0.started" in inputs_of(exported(dampened, tmp_path, loss_scale=scale))


def test_a_first_step_that_overflows_is_still_to_come(tmp_path):
    def factory():
        module, loss, _, batch = recipes.with_optimizer(dampened)()
        made = torch.optim.SGD(module.parameters(), 1e-5, momentum=0.9, dampening=0.3)
        return module, lambda output, target: loss(output, target) * 1000, made, batch

    options = ExportOptions(check=12, loss_scale="dynamic", autocast=Autocast.FP16)
    found = export(factory, tmp_path / "step.onnx", options=options)
    assert "optimizer0.started" in inputs_of(found)
    assert found.checked.losses[0] != found.checked.losses[-1]


@pytest.mark.parametrize(("scale", "steps"), [(1e38, 12), ("dynamic", 3)])
def test_steps_that_all_overflow_compare_nothing_and_are_refused(scale, steps, tmp_path):
    def factory():
        module, loss, optimizer, batch = recipes.with_optimizer(dampened)()
        return module, lambda output, target: loss(output, target) * 1e35, optimizer, batch

    with pytest.raises(UnsupportedError, match=f"overflow in each of {steps} compared steps"):
        export(factory, tmp_path / "step.onnx", options=ExportOptions(check=steps, loss_scale=scale))
    assert not list(tmp_path.iterdir())


def test_behind_overflows_of_the_first_steps_the_states_are_those_of_eager_pytorch(tmp_path, monkeypatch):
    """A scale of 1e36 halves until nothing overflows; steps before that store no state.

    Without LayerNorm: eager PyTorch's kernel overflows at smaller gradients than the formula does.
    """
    scaler = torch.amp.GradScaler
    monkeypatch.setattr("gopt.frontends.pytorch.tracing.FIRST_SCALE", 1e36)

    def huge(*at, **given):
        return scaler(*at, **given if "enabled" in given else {"init_scale": 1e36})

    monkeypatch.setattr(torch.amp, "GradScaler", huge)

    def factory():
        net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        made = torch.optim.SGD(net.parameters(), 1e-5, momentum=0.9)
        batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
        return net, lambda output, target: torch.nn.functional.cross_entropy(output, target) * 1e3, made, batch

    found = export(factory, tmp_path / "step.onnx", options=ExportOptions(check=12, loss_scale="dynamic"))
    assert 1 < found.checked.updates < 11 and found.checked.losses[0] == found.checked.eager_losses[0]
    assert any(each.endswith("momentum_buffer") for each in inputs_of(found))


def test_an_optimizer_that_has_trained_has_no_first_step(tmp_path):
    def factory():
        net, loss, optimizer, (x, y) = recipes.with_optimizer(dampened)()
        loss(net(x), y).backward()
        optimizer.step()
        return net, loss, optimizer, (x, y)

    found = export(factory, tmp_path / "step.onnx", options=ExportOptions(check=STEPS))
    assert "optimizer0.started" not in inputs_of(found)


def test_one_of_two_optimizers_has_a_first_step(tmp_path):
    def factory():
        net, loss, (_, second), batch = recipes.two_optimizers()
        return net, loss, [dampened(net[0].parameters()), second], batch

    found = export(factory, tmp_path / "step.onnx", options=ExportOptions(check=STEPS))
    assert {"optimizer0.started"} == {name for name in inputs_of(found) if "started" in name}


def test_a_random_first_value_is_a_value_of_the_file(tmp_path):
    found = exported(special.RandomStart, tmp_path)
    assert not any(name.startswith("draw_") for name in found.inputs)
    assert any("draw_0" in note for note in found.notes)


def test_what_a_state_holds_beside_tensors_is_there_in_the_trace(tmp_path):
    net, loss, _, batch = recipes.with_optimizer(dampened)()
    optimizer = special.Flagged(net.parameters())
    export((net, loss, optimizer, batch), tmp_path / "step.onnx")
    assert not any(optimizer.state.values()), "the user's optimizer is as it was"


def test_code_for_lists_is_followed_where_the_other_code_differs(tmp_path, monkeypatch):
    exported(special.InLists, tmp_path)
    monkeypatch.setattr("gopt.frontends.pytorch.recorded_step.chooses_lists", lambda optimizer: False)
    with pytest.raises(UnsupportedError, match="not the eager one"):
        exported(special.InLists, tmp_path / "other")


def test_lists_are_chosen_by_an_option_or_an_attribute():
    net = torch.nn.Linear(2, 2)
    assert optimizer_runs.chooses_lists(special.InLists(net.parameters()))
    assert not optimizer_runs.chooses_lists(special.InLists(net.parameters(), foreach=False))
    assert not optimizer_runs.chooses_lists(torch.optim.Adam(net.parameters(), foreach=True))


def test_a_tensor_that_code_does_not_take_the_value_of_keeps_its_type(tmp_path):
    model = onnx.load(exported(special.ReadScale, tmp_path).model)
    sizes = [each for each in model.graph.input if each.name.endswith(".size")]
    assert sizes and {each.type.tensor_type.elem_type for each in sizes} == {onnx.TensorProto.FLOAT}
    casts = [each for node in model.graph.node if node.op_type == "Cast" for each in node.attribute]
    assert onnx.TensorProto.DOUBLE not in [each.i for each in casts], "nothing is computed in float64"


def matrices(maker):
    return lambda parameters: maker([each for each in parameters if each.dim() == 2])


def test_rounding_in_bfloat16_is_no_difference(tmp_path):
    assert exported(matrices(special.Narrow), tmp_path, check=20).nodes


def test_a_wrong_factor_in_bfloat16_is_a_difference(tmp_path, monkeypatch):
    step = check.EagerStates.step

    def planted(self, *given):
        monkeypatch.setattr(special.Narrow, "factor", 1.05)
        return step(self, *given)

    real = check.compare

    def compare(*args):
        monkeypatch.setattr(check.EagerStates, "step", planted)
        return real(*args)

    monkeypatch.setattr("gopt.frontends.pytorch.export.compare", compare)
    with pytest.raises(UnsupportedError, match="not the eager one"):
        exported(matrices(special.Narrow), tmp_path)
