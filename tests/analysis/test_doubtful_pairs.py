"""Steps whose shapes tell nothing apart, and whose walk reaches a fed or constant input before the state: refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import Builder, perceptron

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError

SHAPE = (3, 3)
Rule = Callable[[Builder, str], dict[str, str]]
"""Writes the update of ``w0`` from its gradient; the pairs that are meant."""


def step(folder: Path, rule: Rule) -> tuple[Path, dict[str, str]]:
    """One layer of three by three under a batch of three, and the pairs that are meant."""
    b = Builder()
    net = perceptron(b, (3, 3), batch=3, bias=False)
    b.output("loss", net.loss, ())
    meant = rule(b, net.gradients["w0"])
    return b.save(folder / "step.onnx"), meant


def stepped(b: Builder, update: str) -> str:
    return b.op("Sub", "w0", b.op("Mul", update, b.const(0.1)))


def values(place: int) -> np.ndarray:
    return np.linspace(0.1, 0.9, 9, dtype=np.float32).reshape(SHAPE) + np.float32(place)


def drawn_to_an_anchor(b: Builder, gradient: str) -> dict[str, str]:
    """The state keeps a gradient with a pull to a fed anchor: the anchor was its old value."""
    pull = b.op("Sub", "w0", b.input("anchor", SHAPE))
    pulled = b.op("Add", gradient, b.op("Mul", pull, b.const(0.1)))
    old = b.state("old", values(0))
    b.output("old_new", pulled, SHAPE)
    b.output("w0_new", stepped(b, b.op("Sub", b.op("Mul", pulled, b.const(1.5)), old)), SHAPE)
    return {"w0": "w0_new", "old": "old_new"}


def pruned_and_kept(b: Builder, gradient: str) -> dict[str, str]:
    """The state keeps the last change: it replaced the parameter, and the parameter replaced the fed mask."""
    old = b.state("old", values(0))
    new = b.op("Mul", stepped(b, b.op("Add", gradient, old)), b.input("mask", SHAPE))
    b.output("old_new", b.op("Sub", new, "w0"), SHAPE)
    b.output("w0_new", new, SHAPE)
    return {"w0": "w0_new", "old": "old_new"}


def constant_offset(b: Builder, gradient: str) -> dict[str, str]:
    """A shown gradient with a constant in it: the constant was a state."""
    shifted = b.op("Add", gradient, b.const(values(0)))
    b.output("shown", b.op("Clip", shifted, b.const(-1.0), b.const(1.0)), SHAPE)
    b.output("w0_new", stepped(b, shifted), SHAPE)
    return {"w0": "w0_new"}


def fed_offset(b: Builder, gradient: str) -> dict[str, str]:
    """The same with a fed one."""
    shifted = b.op("Add", gradient, b.input("offset", SHAPE))
    b.output("shown", b.op("Abs", shifted), SHAPE)
    b.output("w0_new", stepped(b, shifted), SHAPE)
    return {"w0": "w0_new"}


def fed_sum(b: Builder, gradient: str) -> dict[str, str]:
    """A shown sum of the gradient and a fed tensor: the tensor was an accumulator."""
    rate = b.input("rate", SHAPE)
    b.output("shown", b.op("Add", gradient, rate), SHAPE)
    b.output("w0_new", b.op("Sub", "w0", b.op("Mul", gradient, rate)), SHAPE)
    return {"w0": "w0_new"}


def fed_beside_moments(b: Builder, gradient: str) -> dict[str, str]:
    """A fed tensor, scaled and shown, where the momentum has a stored value."""
    new = b.op("Add", b.op("Mul", b.small("m", SHAPE), b.const(0.9)), gradient)
    mask = b.input("mask", SHAPE)
    b.output("shown", b.op("Mul", mask, b.const(0.5)), SHAPE)
    b.output("m_new", new, SHAPE)
    b.output("w0_new", stepped(b, b.op("Mul", new, mask)), SHAPE)
    return {"w0": "w0_new", "m": "m_new"}


def stored_mask_shown(b: Builder, gradient: str) -> dict[str, str]:
    """A mask with a stored value, scaled and shown: it shrank from step to step."""
    mask = b.small("mask", SHAPE)
    b.output("shown", b.op("Mul", mask, b.const(0.5)), SHAPE)
    b.output("w0_new", stepped(b, b.op("Mul", gradient, mask)), SHAPE)
    return {"w0": "w0_new"}


def old_gradient_shown(b: Builder, gradient: str) -> dict[str, str]:
    """A state keeps the gradient, and its change is shown: the change replaced the state."""
    old = b.state("old", values(0))
    change = b.op("Sub", gradient, old)
    b.output("shown", b.op("Clip", change, b.const(-1.0), b.const(1.0)), SHAPE)
    b.output("old_new", gradient, SHAPE)
    b.output("w0_new", stepped(b, b.op("Add", gradient, change)), SHAPE)
    return {"w0": "w0_new", "old": "old_new"}


def old_sign_shown(b: Builder, gradient: str) -> dict[str, str]:
    """The same, with the sign of the old gradient alone: it follows no batch."""
    old = b.state("old", values(0))
    b.output("shown", b.op("Sign", old), SHAPE)
    b.output("old_new", gradient, SHAPE)
    b.output("w0_new", stepped(b, b.op("Sub", gradient, old)), SHAPE)
    return {"w0": "w0_new", "old": "old_new"}


NAMED = [drawn_to_an_anchor, pruned_and_kept, old_gradient_shown, old_sign_shown]
NO_STATES = [constant_offset, fed_offset, fed_sum, fed_beside_moments, stored_mask_shown]


@pytest.mark.parametrize("rule", [*NAMED, *NO_STATES])
def test_a_pair_that_may_not_be_meant_is_refused(rule, tmp_path):
    path, _ = step(tmp_path, rule)
    with pytest.raises(UnsupportedError, match="the data flow does not say") as refused:
        gopt.load(path)
    assert "--states" in str(refused.value.hints)


@pytest.mark.parametrize("rule", NAMED)
def test_named_pairs_settle_it(rule, tmp_path):
    path, meant = step(tmp_path, rule)
    states = gopt.load(path, roles=RoleMap(states=meant, batch=("x", "y"))).training.states
    assert {state.tensor: state.updated for state in states} == meant


def shown_gradient(b: Builder, gradient: str) -> dict[str, str]:
    """Adam's two moments, averaged parameters, a pruning mask that is fed, and the gradient as a metric."""
    masked = b.op("Mul", gradient, b.input("mask", SHAPE))
    first = b.op("Add", b.op("Mul", b.small("m", SHAPE), b.const(0.9)), b.op("Mul", masked, b.const(0.1)))
    square = b.op("Mul", masked, masked)
    second = b.op("Add", b.op("Mul", b.small("v", SHAPE), b.const(0.9)), b.op("Mul", square, b.const(0.1)))
    new = stepped(b, b.op("Div", first, b.op("Add", b.op("Sqrt", second), b.const(1e-3))))
    mean = b.op("Add", b.op("Mul", b.small("mean", SHAPE), b.const(0.9)), b.op("Mul", new, b.const(0.1)))
    for name, value in {"mean": mean, "v": second, "w0": new, "m": first}.items():
        b.output(f"{name}_new", value, SHAPE)
    return {name: f"{name}_new" for name in ("w0", "m", "v", "mean")}


def slow_weights(b: Builder, gradient: str) -> dict[str, str]:
    """Lion with lookahead: its moment and its slow weights are read beside their new values."""
    moment, slow = b.small("m", SHAPE), b.small("slow", SHAPE)
    kept, fresh = b.op("Mul", moment, b.const(0.9)), b.op("Mul", gradient, b.const(0.1))
    fast = stepped(b, b.op("Sign", b.op("Add", kept, fresh)))
    near = b.op("Add", slow, b.op("Mul", b.op("Sub", fast, slow), b.const(0.5)))
    more = b.op("Add", b.op("Mul", moment, b.const(0.99)), b.op("Mul", gradient, b.const(0.01)))
    for name, value in {"slow": near, "m": more, "w0": fast}.items():
        b.output(f"{name}_new", value, SHAPE)
    return {name: f"{name}_new" for name in ("w0", "m", "slow")}


@pytest.mark.parametrize("rule", [shown_gradient, slow_weights])
def test_states_of_usual_rules_are_found(rule, tmp_path):
    path, meant = step(tmp_path, rule)
    assert {state.tensor: state.updated for state in gopt.load(path).training.states} == meant


@pytest.mark.parametrize("stored", [False, True])
def test_a_moment_that_is_read_beside_its_new_value_is_a_state_beside_gradients(stored, tmp_path):
    def lion(b: Builder, gradient: str) -> dict[str, str]:
        moment = b.state("m", values(0), stored=stored)
        kept, fresh = b.op("Mul", moment, b.const(0.9)), b.op("Mul", gradient, b.const(0.1))
        more = b.op("Add", b.op("Mul", moment, b.const(0.99)), b.op("Mul", gradient, b.const(0.01)))
        if stored:
            b.output("shown", b.op("Identity", gradient), SHAPE)
        b.output("m_new", more, SHAPE)
        b.output("w0_new", stepped(b, b.op("Sign", b.op("Add", kept, fresh))), SHAPE)
        return {"w0": "w0_new", "m": "m_new"}

    path, meant = step(tmp_path, lion)
    roles = RoleMap(batch=("x", "y"))
    assert {state.tensor: state.updated for state in gopt.load(path, roles=roles).training.states} == meant
