"""A counter of steps without a stored value starts at zero; what is fed and shown plus one does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto
from written_steps import NET, Written, each, hold_ranks, saved

import gopt
from gopt.errors import UnsupportedError

KINDS = {"int64": "value_int = 1", "float": "value = float {1}"}
UPDATE = each("  s_@ = Mul(g@, lr)\n  v_@ = Div(s_@, root)\n  @_out = Sub(@, v_@)\n")


def step(name: str, kind: str, added: str = "", shape: tuple[int, ...] = ()) -> Written:
    """SGD whose rate falls with the root of a counter."""
    count = added or f"  one = Constant<{KINDS[kind]}>()\n  {name}_out = Add(one, {name})\n"
    body = NET + count + f"  as_float = Cast<to = 1>({name}_out)\n  root = Sqrt(as_float)\n" + UPDATE
    return Written(body, {name: (kind, shape)}, start={name: 0})


def unvalued(step: Written, name: str) -> ModelProto:
    model = step.model()
    kept = [each for each in model.graph.initializer if each.name != name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


@pytest.mark.parametrize(("name", "kind", "shape"), [
    ("step", "int64", ()), ("adam.step", "float", ()), ("t", "int64", (1,)), ("numUpdates", "float", ()),
    ("num_batches_tracked", "int64", ()), ("iter2", "float", (1,)),
])  # fmt: skip
def test_it_starts_at_zero(name: str, kind: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    if "." in name:
        name = name.replace(".", "_")
    written = step(name, kind, shape=shape)
    source = gopt.load(saved(unvalued(written, name), tmp_path))
    assert f"{name} counts steps and has no stored value: it starts at zero" in source.training.notes
    assert np.all(source.training.graph.initializers[name].numpy() == 0)


def test_its_ranks_are_right(tmp_path: Path) -> None:
    written = step("step", "int64")
    hold_ranks(written, tmp_path, 2, 2, file=unvalued(written, "step"))


@pytest.mark.parametrize(("name", "added"), [
    ("rate", ""),  # no name of a counter
    ("step", "  two = Constant<value = float {2}>()\n  step_out = Add(step, two)\n"),
    ("step", "  one = Constant<value = float {1}>()\n  step_out = Mul(step, one)\n"),
    ("step", "  one = Constant<value = float {1}>()\n  more = Add(step, one)\n  step_out = Add(more, one)\n"),
])  # fmt: skip
def test_others_are_refused(name: str, added: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no stored value, as other states have") as refused:
        gopt.load(saved(unvalued(step(name, "float", added), name), tmp_path))
    assert f"--states {name}={name}_out" in refused.value.hints[1]


def test_a_value_of_the_user_stays(tmp_path: Path) -> None:
    np.savez(tmp_path / "at.npz", step=np.int64(7))
    source = gopt.load(saved(unvalued(step("step", "int64"), "step"), tmp_path), state=tmp_path / "at.npz")
    assert source.training.graph.initializers["step"].numpy() == 7


def test_a_step_without_any_value_keeps_none(tmp_path: Path) -> None:
    model = step("step", "int64").model()
    del model.graph.initializer[:]
    assert "step" not in gopt.load(saved(model, tmp_path)).training.graph.initializers
