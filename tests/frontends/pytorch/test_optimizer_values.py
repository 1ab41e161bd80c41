"""Optimizers with states in containers, in groups and under keys of their own. By hand, ``pytest -m torch``."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

import carrying_optimizers as carrying  # noqa: E402
import export_recipes as recipes  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
from eager_beside import assert_goes_on  # noqa: E402

import gopt  # noqa: E402
from gopt.errors import InputError, UnsupportedError  # noqa: E402
from gopt.frontends.pytorch.export import export  # noqa: E402
from gopt.frontends.pytorch.options import ExportOptions  # noqa: E402
from gopt.frontends.pytorch.value_trees import find, fresh, leaves, mapped, put  # noqa: E402
from gopt.verbs.folders import load_values  # noqa: E402


def exported(maker, folder):
    return export(recipes.with_optimizer(maker), folder / "step.onnx", options=ExportOptions(check=5))


def states_of(found):
    return {value.name for value in onnx.load(found.model).graph.input}


@pytest.mark.parametrize("maker", carrying.ALL, ids=lambda each: each.__name__)
def test_carried_values_are_states_that_ranks_share_out(maker, tmp_path):
    found = exported(maker, tmp_path)
    for stage in (2, 3):
        folder = tmp_path / f"ranks{stage}"
        gopt.shard(gopt.load(found.model), 3, stage=stage).write(folder)
        assert gopt.prove(folder).proven
        assert not gopt.verify(folder).to_json()["failing"]["values"]


@pytest.mark.parametrize("maker", carrying.LATE, ids=lambda each: each.__name__)
def test_values_that_change_behind_the_second_step_are_states(maker, tmp_path):
    found = export(recipes.with_optimizer(maker), tmp_path / "step.onnx", options=ExportOptions(check=7))
    assert found.checked.worst < 1e-4 and not found.notes


PLACES = {carrying.LateInState: r"state 0\.weight, scales, own", carrying.LateInQueue: "attribute queue, 0"}


@pytest.mark.parametrize("maker", PLACES, ids=lambda each: each.__name__)
def test_a_late_change_elsewhere_is_refused_with_its_place(maker, tmp_path):
    """Three compared steps would show no difference."""
    with pytest.raises(UnsupportedError, match=f"that its first two steps leave as it is: '{PLACES[maker]}'"):
        export(recipes.with_optimizer(maker), tmp_path / "step.onnx")


NAMES = {
    carrying.Nested: {"0.weight.momenta.0.9", "0.weight.momenta.0.5", "0.bias.norms.0", "3.weight.pair.0"},
    carrying.InGroup: {"optimizer0.group0.slope", "optimizer0.group0.scale", "optimizer0.group0.last"},
    carrying.OwnRate: {"optimizer0.group0.lr"},
    carrying.OfNoParameter: {"optimizer0.k", "optimizer0.averages.short"},
    carrying.InAttribute: {"optimizer0.size", "optimizer0.counts.step"},
    carrying.SizedOnce: {"0.weight.size"},
}


@pytest.mark.parametrize("maker", NAMES, ids=lambda each: each.__name__)
def test_names_say_where_a_value_stands(maker, tmp_path):
    found = states_of(exported(maker, tmp_path))
    assert found >= NAMES[maker]
    assert ("lr" in found) == (maker is not carrying.OwnRate)


def groups(maker):
    net, loss, _, batch = recipes.groups()
    first, *rest = net.parameters()
    return net, loss, maker([{"params": [first]}, {"params": rest, "lr": 0.02}]), batch


@pytest.mark.parametrize("maker", (carrying.Nested, carrying.InGroup, carrying.OfNoParameter), ids=lambda x: x.__name__)
def test_eager_training_goes_on_with_what_ranks_saved(maker, tmp_path):
    def make():
        return groups(maker)

    found = export(make, tmp_path / "step.onnx")
    gopt.shard(gopt.load(found.model), 2).write(tmp_path / "ranks")
    x, y = groups(maker)[-1]
    rng = np.random.default_rng(0)
    data = {
        name: rng.standard_normal((len(value) * 10, *value.shape[1:])).astype(np.float32)
        if value.is_floating_point() else rng.integers(0, recipes.CLASSES, (len(value) * 10,))
        for name, value in zip(found.inputs, (x, y))
    }  # fmt: skip
    assert_goes_on(make, tmp_path / "ranks", data, tmp_path)


def trained(maker, steps):
    torch.manual_seed(1)
    net, loss, optimizer, (x, y) = groups(maker)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("maker", (carrying.Nested, carrying.InGroup, carrying.OfNoParameter), ids=lambda x: x.__name__)
def test_states_of_eager_training_come_into_a_step(maker, tmp_path):
    found = export(lambda: groups(maker), tmp_path / "step.onnx")
    net, optimizer = trained(maker, 2)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "trained.pt")
    load_values(found.model, tmp_path / "trained.pt", tmp_path / "later.onnx")
    graph = onnx.load(tmp_path / "later.onnx").graph
    values = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    for name, wanted in wanted_of(maker, optimizer).items():
        np.testing.assert_allclose(values[name], torch.as_tensor(wanted).numpy(), err_msg=name)


def wanted_of(maker, optimizer):
    group, second = optimizer.param_groups
    if maker is carrying.InGroup:
        return {"optimizer0.group0.slope": group["slope"], "optimizer0.group1.scale": second["scale"]}
    if maker is carrying.OfNoParameter:
        state = optimizer.state
        return {"optimizer0.k": state["k"], "optimizer0.averages.short": state["averages"]["short"]}
    state = optimizer.state[group["params"][0]]
    return {"0.weight.momenta.0.9": state["momenta"][0.9], "0.weight.pair.0": state["pair"][0]}


def test_a_file_without_a_value_in_a_container_is_refused(tmp_path):
    found = export(lambda: groups(carrying.Nested), tmp_path / "step.onnx")
    net, optimizer = trained(carrying.Nested, 1)
    content = optimizer.state_dict()
    del content["state"][0]["momenta"][0.9]
    torch.save({"model": net.state_dict(), "optimizer": content}, tmp_path / "trained.pt")
    with pytest.raises(InputError, match=r"no '0.weight.momenta.0.9' in 'momenta'"):
        load_values(found.model, tmp_path / "trained.pt", tmp_path / "later.onnx")


def test_the_users_optimizer_is_as_it_was(tmp_path):
    net, loss, optimizer, batch = groups(carrying.OfNoParameter)
    averages = optimizer.state["averages"]
    export((net, loss, optimizer, batch), tmp_path / "step.onnx")
    assert optimizer.state["averages"] is averages and averages == {"short": 0.0}
    assert "k" not in optimizer.state


def test_containers_are_walked_and_changed_by_keys():
    whole = {"a": [1, {0.5: torch.zeros(2)}], "b": ("text", 2.0), "c": None}
    assert [keys for keys, _ in leaves(whole)] == [("a", 0), ("a", 1, 0.5), ("b", 1)]
    other = fresh(whole)
    put(other, ("a", 1, 0.5), 7)
    put(other, ("b", 1), 8)
    assert other["a"] == [1, {0.5: 7}] and other["b"] == ("text", 8)
    assert whole["b"] == ("text", 2.0) and find(whole, ("a", 1, 0.5)).shape == (2,)
    assert find(whole, ("a", 2)) is None and find(whole, ("c", "d")) is None
    assert mapped({"a": (1, "x")}, lambda leaf: leaf + 1) == {"a": (2, "x")}


def test_a_tensor_of_two_places_that_part_later_is_refused(tmp_path):
    class Parting(carrying.Shared):
        def end(self):
            if self.state["a"] > 100:
                self.state["b"] = self.state["a"].clone()

    found = exported(carrying.Shared, tmp_path)
    assert "optimizer0.a" in states_of(found) and "optimizer0.b" not in states_of(found)
    with pytest.raises(UnsupportedError, match=r"'optimizer0\.a' stands in several places before a step"):
        exported(Parting, tmp_path / "other")
