"""Optimizers that count in Python: right in later steps too, or refused by name. By hand, ``pytest -m torch``."""

from __future__ import annotations

import onnx
import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import counting_optimizers as counting  # noqa: E402
import export_recipes as recipes  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import UnsupportedError  # noqa: E402
from gopt.frontends.pytorch import python_numbers  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
from gopt.frontends.pytorch.python_values import changed, python_values  # noqa: E402

LATER = 20
"""Steps that are compared: what is frozen at an early step shows."""


def exported(maker, folder, steps=LATER):
    return export(recipes.with_optimizer(maker), folder / "step.onnx", options=ExportOptions(check=steps))


COUNTED = (
    counting.Attribute,
    counting.Power,
    counting.Group,
    counting.State,
    counting.Previous,
    counting.Nested,
    counting.Real,
)


@pytest.mark.parametrize("maker", COUNTED, ids=lambda each: each.__name__)
def test_a_count_in_python_becomes_a_state(maker, tmp_path):
    found = exported(maker, tmp_path)
    assert found.states > found.parameters, "the count is a state"
    gopt.shard(gopt.load(found.model), 2)


REFUSED = {
    counting.LateInState: r"more than 32 paths by branches on .*state\[.step.\] <= 5",
    counting.Whole: r"takes int\(\) of .*int\(self\.count\)",
    counting.Listed: r"attribute past, length' is '1' after one step and '2' after two",
    counting.Iterated: r"attribute steps, content' is",
    counting.InSlots: r"attribute held, steps' is",
    counting.Deep: r"more than 32 paths by branches on .*held\[.n.\] <= 60",
    counting.InClosure: r"attribute number, steps' is",
    counting.InClass: r"class InClass, total' is",
    counting.InGlobal: r"global of begin, CALLS, step' is",
}


@pytest.mark.parametrize("maker", REFUSED, ids=lambda each: each.__name__)
def test_what_three_steps_do_not_show_is_refused_with_its_place(maker, tmp_path):
    with pytest.raises(UnsupportedError, match=REFUSED[maker]):
        exported(maker, tmp_path, 3)
    assert not list(tmp_path.iterdir())


def layered(counts):
    torch.manual_seed(0)
    net = torch.nn.Sequential(counting.CountingLayer(4, 3, counts=counts))
    batch = (torch.randn(6, 4), torch.randn(6, 3))
    return net, torch.nn.functional.mse_loss, torch.optim.SGD(net.parameters(), 0.1), batch


def test_a_count_in_a_module_or_a_loss_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="'module 0, calls' is '1' after one step and '2' after two"):
        export(layered(True), tmp_path / "step.onnx")
    net, _, optimizer, batch = layered(False)
    with pytest.raises(UnsupportedError, match="'closure of loss, calls' is '1' after one step and '2' after two"):
        export((net, counting.counting_loss(), optimizer, batch), tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match="'loss, calls' is '1' after one step and '2' after two"):
        export((net, counting.Called(), optimizer, batch), tmp_path / "step.onnx")
    assert not list(tmp_path.iterdir())


def test_a_result_that_a_module_keeps_is_no_count(tmp_path):
    net, *rest = layered(False)
    net(rest[-1][0])
    before = net[0].last
    assert export((net, *rest), tmp_path / "step.onnx").parameters == 2
    assert net[0].last is before and net[0].calls == 0


SWITCHING = {
    "radam": lambda p: torch.optim.RAdam(p, 0.01), "asgd": lambda p: torch.optim.ASGD(p, 0.05, t0=5),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHING)
def test_what_switches_at_a_later_step_is_right_behind_it(name, tmp_path):
    assert len(exported(SWITCHING[name], tmp_path).checked.losses) == LATER


def test_groups_and_optimizers_count_for_themselves(tmp_path):
    def factory():
        net, loss, _, batch = recipes.groups()
        first = [{"params": [net[0].weight], "decay": 0.9}, {"params": [net[2].weight], "lr": 0.01}]
        made = [
            counting.Group(first),
            counting.Attribute(net[3].parameters(), decay=0.8),
            counting.Attribute([net[2].bias]),
        ]
        return net, loss, made, batch

    found = export(factory, tmp_path / "step.onnx", options=ExportOptions(check=LATER))
    states = {each.name for each in onnx.load(found.model).graph.input}
    assert {"optimizer0.group0.step", "optimizer0.group1.step", "optimizer1.count", "optimizer2.count"} <= states


def test_the_users_optimizer_is_as_it_was(tmp_path):
    net, loss, _, batch = recipes.groups()
    optimizer = counting.Group(net.parameters())
    optimizer.count = 7
    export((net, loss, optimizer, batch), tmp_path / "step.onnx")
    assert (type(optimizer.count), optimizer.count) == (int, 7)
    assert "step" not in optimizer.param_groups[0] and optimizer.param_groups[0]["lr"] == 0.05


def test_a_count_that_is_raised_in_place_is_seen_by_who_holds_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(python_numbers, "AUGMENTED", {})
    with pytest.raises(UnsupportedError, match="not the eager one"):
        exported(counting.Previous, tmp_path)


def test_every_kind_of_python_value_is_seen():
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    names = {id(each): name for name, each in layer.named_parameters()}
    optimizer.flag, optimizer.deep, optimizer.held = False, {"a": [1, (2, 3)]}, torch.zeros(2)
    before = python_values(optimizer, names)
    optimizer.flag, optimizer.deep["a"][1] = True, (2, 4)
    optimizer.held.add_(1)
    optimizer.param_groups[0]["name"] = "late"
    optimizer.state[layer.weight]["sides"] = None
    seen = {", ".join(path) for path, _, _ in changed(before, python_values(optimizer, names))}
    assert {"attribute flag", "attribute deep, a, 1, 1", "attribute held", "group 0, name"} <= seen
    assert "state weight, keys" in seen and not any("params" in each for each in seen)
