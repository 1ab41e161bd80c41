"""``gopt export`` against eager PyTorch: run by hand, ``pytest -m torch tests/frontends``, where torch is installed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import export_recipes as recipes  # noqa: E402
from gopt.cli.main import main  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import InputError, OptionError, UnsupportedError  # noqa: E402
from gopt.frontends.pytorch import check  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import Autocast, Draws, ExportOptions, Schedules  # noqa: E402

HERE = Path(__file__).parent


def exported(name_or_factory, folder, **options):
    factory = recipes.STEPS[name_or_factory] if isinstance(name_or_factory, str) else name_or_factory
    return export(factory, folder / "step.onnx", options=ExportOptions(**options))


@pytest.mark.parametrize("name", recipes.STEPS)
def test_every_step_agrees_with_eager_pytorch_and_is_sharded(name, tmp_path):
    found = exported(name, tmp_path)
    assert found.checked.losses == pytest.approx(found.checked.eager_losses, rel=1e-4)
    assert len(set(found.checked.losses)) == 3, "a loss that stands still shows nothing"
    source = gopt.load(found.model)
    assert len(source.training.parameters) == found.parameters
    if name != "optimizer asgd":  # gopt finds no gradient of it
        gopt.shard(source, 2)


OPTIONS = {
    "clip_norm": {"clip_norm": 0.05}, "clip_value": {"clip_value": 0.01}, "ema": {"ema": 0.9},
    "fixed scale": {"loss_scale": 1024.0, "clip_norm": 0.05}, "dynamic scale": {"loss_scale": "dynamic"},
    "fp16": {"autocast": Autocast.FP16, "loss_scale": "dynamic"}, "bf16": {"autocast": Autocast.BF16},
    "hyper": {"hyper": ("weight_decay", "betas", "eps")},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_agree_with_eager_pytorch_and_change_the_step(options, tmp_path):
    plain = exported("groups", tmp_path)
    (tmp_path / "step.onnx").unlink()
    found = exported("groups", tmp_path, **options)
    assert (found.nodes, found.states, found.inputs) != (plain.nodes, plain.states, plain.inputs)


def test_an_overflow_leaves_parameters_and_halves_the_scale(tmp_path):
    def factory():
        module, (x, y) = torch.nn.Linear(6, recipes.CLASSES), recipes.batch(8, 6)
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        return module, lambda output, y: torch.nn.functional.cross_entropy(output, y) * 1e34, optimizer, (x, y)

    found = exported(factory, tmp_path, loss_scale="dynamic", check=6)
    assert 0 < found.checked.updates < 6  # the check has compared scale, counter and parameters in both kinds of steps


def test_random_nodes_replace_inputs(tmp_path):
    found = exported("dropout", tmp_path, draws=Draws.NODES)
    assert not any(name.startswith("draw_") for name in found.inputs)
    kinds = [node.op_type for node in onnx.load(found.model).graph.node]
    assert kinds.count("RandomUniform") == 2


def test_names_are_the_users_and_roles_are_metadata(tmp_path):
    found = exported("tied", tmp_path)
    model = onnx.load(found.model)
    inputs = {each.name for each in model.graph.input}
    assert {"ids", "labels", "lr", "words.weight", "words.weight.exp_avg", "layer.linear1.bias"} <= inputs
    assert "head.weight" not in inputs, "a tied weight is one state"
    entry = next(each for each in model.metadata_props if each.key == "gopt.roles")
    assert json.loads(entry.value)["states"]["words.weight"] == "words.weight_out"
    assert gopt.load(found.model).training.loss == "loss"


def test_a_frozen_parameter_keeps_its_name_and_is_no_input(tmp_path):
    model = onnx.load(exported("groups", tmp_path).model)
    assert "0.bias" in {each.name for each in model.graph.initializer}
    assert "0.bias" not in {each.name for each in model.graph.input}


def test_a_schedule_in_the_graph_is_told(tmp_path):
    """Beside the constant that is fed as lr, it seemed to be lost."""
    factory = recipes.with_scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    assert "the schedule is in the graph: lr is its base" in exported(factory, tmp_path).notes


def test_a_schedule_without_a_closed_form_is_fed(tmp_path):
    def factory():
        return recipes.with_scheduler(
            lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4, cycle_momentum=False)
        )()

    found = exported(factory, tmp_path)
    assert "lr" in found.inputs and any("gopt run feeds lr" in note for note in found.notes)
    with pytest.raises(UnsupportedError, match="cannot be written into the graph"):
        exported(factory, tmp_path / "other", schedules=Schedules.GRAPH)


REFUSED = {
    "lbfgs": (recipes.with_optimizer(lambda p: torch.optim.LBFGS(p)), UnsupportedError, "by a closure"),
    "dropout computed again": (recipes.checkpointed(False, 0.5), UnsupportedError, "random numbers"),
    "no tuple": (lambda: None, InputError, "NoneType"),
    "no loss": (
        lambda: ((net := torch.nn.Linear(2, 2)), None, torch.optim.SGD(net.parameters()), (torch.ones(1, 2),)),
        InputError, "not a loss of one element",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(name, tmp_path):
    factory, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        exported(factory, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_branch_on_values_is_refused(tmp_path):
    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 4)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else self.layer(-x)

    net = Branching()
    batch = (torch.ones(4, 6), torch.tensor([0, 1, 2, 3]))
    step = (net, torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), 0.1), batch)
    with pytest.raises(UnsupportedError, match=r"branches on a value .* in test_pytorch_export.py, line"):
        exported(lambda: step, tmp_path)


def test_the_check_sees_a_planted_difference(tmp_path, monkeypatch):
    run = check.Executor.run

    def planted(self, feeds, *call):
        results = run(self, feeds, *call)
        return {name: value * 1.01 if name == "0.weight_out" else value for name, value in results.items()}

    monkeypatch.setattr(check.Executor, "run", planted)
    with pytest.raises(UnsupportedError, match=r"'0\.weight' after step 1"):
        exported("groups", tmp_path)
    assert not list(tmp_path.iterdir())


def moved_further(name, share, types):
    """A run after which a state of one of these types has changed by a share more."""
    run = check.Executor.run

    def planted(self, feeds, *call):
        results = run(self, feeds, *call)
        new = results.get(f"{name}_out")
        if new is not None and new.dtype.str[1:] in types:
            before = feeds[name] if name in feeds else self.graph.initializers[name].numpy()
            results[f"{name}_out"] = new + np.asarray(share, new.dtype) * (new - before)
        return results

    return planted


class Attention(torch.nn.Module):
    """The bias of scores under a softmax has a gradient that is rounding alone."""

    def __init__(self):
        super().__init__()
        self.keys, self.score, self.head = torch.nn.Linear(6, 4), torch.nn.Linear(4, 1), torch.nn.Linear(6, 3)

    def forward(self, x):
        weights = torch.softmax(self.score(torch.tanh(self.keys(x))), 1)
        return self.head((weights * x).sum(1))


def attention_step(dtype=torch.float32):
    torch.manual_seed(0)
    net = Attention().to(dtype)
    batch = (torch.randn(4, 5, 6).to(dtype), torch.tensor([0, 1, 2, 0]))
    return net, torch.nn.functional.cross_entropy, torch.optim.Adam(net.parameters(), 1e-3), batch


def test_a_gradient_that_is_rounding_alone_is_no_difference_in_float64(tmp_path, monkeypatch):
    monkeypatch.setattr(check.Executor, "run", moved_further("keys.weight", 0.02, "f4"))
    checked = exported(attention_step, tmp_path).checked
    assert "'keys.weight' after step 1" in checked.rounding


def test_a_module_in_bfloat16_is_exported(tmp_path):
    checked = exported(lambda: attention_step(torch.bfloat16), tmp_path).checked
    assert len(checked.losses) == 3


@pytest.mark.parametrize(("share", "types", "equal"), [(0.02, "f4", True), (0.02, "f4 f8", False), (0.5, "f4", False)])
def test_a_difference_of_float32_that_float64_has_not_is_rounding(share, types, equal, tmp_path, monkeypatch):
    """``share``: of a change, planted where a state has one of these types; half of it is too much for rounding."""
    monkeypatch.setattr(check.Executor, "run", moved_further("0.weight", share, types))
    if not equal:
        with pytest.raises(UnsupportedError, match=r"'0\.weight' after step 1"):
            exported("groups", tmp_path)
        return
    checked = exported("groups", tmp_path).checked
    assert "'0.weight' after step 1" in checked.rounding
    assert checked.worst < 1e-5


def test_an_unknown_option_has_a_near_name(tmp_path):
    with pytest.raises(OptionError) as raised:
        exported("groups", tmp_path, hyper=("weightdecay",))
    assert raised.value.hints == ("did you mean 'weight_decay'?",)


def test_the_command_writes_what_the_function_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(HERE)
    out = str(tmp_path / "step.onnx")
    assert main(["export", "export_recipes.py:two_optimizers", "-o", out, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == "gopt-export/1" and record["check"]["steps"] == 3
    assert main(["export", "export_recipes.py:two_optimizer", "-o", out]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["export", "export_recipes.py:two_optimizer", "-o", out, "--force"]) == 2
    assert "did you mean 'two_optimizers'?" in capsys.readouterr().err
    first = Path(out).read_bytes()
    assert main(["export", "export_recipes.py:two_optimizers", "-o", out, "--force", "-q"]) == 0
    assert Path(out).read_bytes() == first, "the same factory and seed give the same bytes"


def test_a_sharded_export_is_proven(tmp_path):
    found = exported("dropout", tmp_path)
    gopt.shard(gopt.load(found.model), 2).write(tmp_path / "ranks")
    assert gopt.verify(tmp_path / "ranks", steps=1).equal
    assert np.isfinite(found.checked.losses).all()
