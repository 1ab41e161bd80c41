"""Two outputs that read one state: what replaces it is no matter of the order of outputs, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import Builder, perceptron

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError
from gopt.verification.verify import Verifier

Shown = Callable[[Builder, str, str], str]
"""Makes what is shown of the new momentum and the gradient."""


def momentum(folder: Path, shown: Shown, first: bool) -> Path:
    """A perceptron under momentum that shows something made of it, before or behind the new momentum."""
    b = Builder()
    net = perceptron(b, (3, 5, 2), bias=False)
    b.output("loss", net.loss, ())
    for name, dims in net.params.items():
        old = b.op("Mul", b.small(f"{name}.m", dims), b.const(0.9))
        new = b.op("Add", old, net.gradients[name])
        made = shown(b, new, net.gradients[name])
        outputs = [(f"{name}.m_new", new), (f"{name}.shown", made)]
        for output, value in outputs[::-1] if first else outputs:
            b.output(output, value, dims)
        b.output(f"{name}_new", b.op("Sub", name, b.op("Mul", new, b.const(0.1))), dims)
    return b.save(folder / "step.onnx")


def nesterov(b: Builder, new: str, gradient: str) -> str:
    return b.op("Add", b.op("Mul", new, b.const(0.9)), gradient)


def normalised(b: Builder, new: str, gradient: str) -> str:
    return b.op("Div", new, b.op("Add", b.op("Abs", gradient), b.const(1e-3)))


def copied(b: Builder, new: str, gradient: str) -> str:
    return b.op("Identity", new)


def scaled(b: Builder, new: str, gradient: str) -> str:
    return b.op("Mul", new, b.const(0.1))


def clipped(b: Builder, new: str, gradient: str) -> str:
    return b.op("Clip", new, b.const(-1.0), b.const(1.0))


def shifted(b: Builder, new: str, gradient: str) -> str:
    return b.op("Add", new, b.const(1e-3))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shown", [nesterov, normalised])
def test_an_update_made_of_a_momentum_is_a_metric(shown, first, tmp_path):
    source = gopt.load(momentum(tmp_path, shown, first))
    assert {state.tensor: state.updated for state in source.training.states} == {
        name: f"{name}_new" for name in ("w0", "w1", "w0.m", "w1.m")
    }
    assert source.training.metrics == ["w0.shown", "w1.shown"]


def test_a_copy_of_a_state_is_either(tmp_path):
    source = gopt.load(momentum(tmp_path, copied, first=True))
    assert {state.tensor for state in source.training.states} == {"w0", "w1", "w0.m", "w1.m"}
    gopt.shard(source, 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shown", [scaled, clipped, shifted])
def test_what_may_as_well_be_the_state_is_refused(shown, first, tmp_path):
    """A momentum that is shown before it is clipped, or behind: once the first output replaced it."""
    path = momentum(tmp_path, shown, first)
    with pytest.raises(UnsupportedError, match=r"'w0\.m_new' and 'w0\.shown' may each be the new value of 'w0\.m'"):
        gopt.load(path)
    for output in ("m_new", "shown"):
        named = {f"w{n}.m": f"w{n}.{output}" for n in (0, 1)}
        states = gopt.load(path, roles=RoleMap(states=named)).training.states
        assert named.items() <= {state.tensor: state.updated for state in states}.items()


def test_one_hint_names_all_pairs(tmp_path):
    """Each run once named one pair more: a step of a hundred parameters took a hundred."""
    with pytest.raises(UnsupportedError, match=r"of 'w0\.m' \(and 1 other state\)") as refused:
        gopt.load(momentum(tmp_path, scaled, first=False))
    assert refused.value.hints[0] == "name the pairs: --states w0.m=w0.m_new,w1.m=w1.m_new"


def scheduled(folder: Path, rate: Callable[[Builder, str, str], str], first: bool, stored: bool = True) -> Path:
    """A perceptron under SGD whose rate is made of a step counter and a fed or stored rate, and shown."""
    b = Builder()
    net = perceptron(b, (3, 5, 2), bias=False)
    b.output("loss", net.loss, ())
    count = b.op("Add", b.state("count", np.float32(3)), b.const(1.0))
    made = rate(b, count, b.state("lr", np.float32(0.1)) if stored else b.input("lr", ()))
    outputs = [("count_new", count), ("rate", made)]
    for output, value in outputs[::-1] if first else outputs:
        b.output(output, value, ())
    for name, dims in net.params.items():
        b.output(f"{name}_new", b.op("Sub", name, b.op("Mul", net.gradients[name], made)), dims)
    return b.save(folder / "step.onnx")


def decayed(b: Builder, count: str, lr: str) -> str:
    return b.op("Mul", b.const(0.1), b.op("Pow", b.const(0.95), count))


def inverse(b: Builder, count: str, lr: str) -> str:
    return b.op("Div", b.const(0.1), b.op("Add", count, b.const(1.0)))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("rate", [decayed, inverse])
def test_a_rate_by_a_curve_over_the_counter_is_a_metric(rate, first, tmp_path):
    source = gopt.load(scheduled(tmp_path, rate, first))
    assert {state.tensor: state.updated for state in source.training.states}["count"] == "count_new"
    assert source.training.metrics == ["rate"]


@pytest.mark.parametrize("first", [False, True])
def test_a_bound_on_the_counter_may_be_the_counter(first, tmp_path):
    path = scheduled(tmp_path, lambda b, count, lr: b.op("Min", count, b.const(10.0)), first)
    with pytest.raises(UnsupportedError, match="may each be the new value of 'count'") as refused:
        gopt.load(path)
    assert "--states count=count_new" in str(refused.value.hints)


def test_a_rate_that_is_fed_is_no_state_for_being_shown(tmp_path):
    """The rate in effect once replaced the rate that is fed: it decayed twice."""

    def halved(b: Builder, count: str, lr: str) -> str:
        return b.op("Mul", lr, b.const(0.5))

    with pytest.raises(UnsupportedError, match="input 'lr' has no stored value") as refused:
        gopt.load(scheduled(tmp_path, halved, first=False, stored=False))
    assert "leave rate out of the step" in str(refused.value.hints)
    kept = gopt.load(scheduled(tmp_path, halved, first=False))
    assert {state.tensor: state.updated for state in kept.training.states}["lr"] == "rate"
