"""Drawn updates whose values all have one shape, with metrics, masks and anchors among them: paired as meant, or
refused; with the states named, always paired."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Builder, perceptron
from onnx import ModelProto

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import InputError, UnsupportedError

SHAPE = (3, 3)
Rule = Callable[["Draw", str, str], str]
"""Parameter and gradient -> what is subtracted, times the rate."""


class Draw:
    """One step: ``meant`` has the pairs that its author means; ``values``, what its metrics are made of."""

    def __init__(self, seed: int, metrics: bool) -> None:
        self.random, self.b = random.Random(seed), Builder(seed)
        self.meant: dict[str, str] = {}
        self.values: list[str] = []
        self.outputs: list[tuple[str, str, tuple[int, ...]]] = []
        self.rate = self.b.const(0.1)
        net = perceptron(self.b, SHAPE, batch=self.random.choice([3, 4]), bias=False)
        self.outputs.append(("loss", net.loss, ()))
        for parameter, gradient in net.gradients.items():
            self.values += [parameter, gradient]
            self._update(parameter, gradient)
        for _ in range(self.random.choice([1, 1, 2]) if metrics else 0):
            self._metric()
        self.random.shuffle(self.outputs)
        self.random.shuffle(self.b.inputs)
        for output, value, shape in self.outputs:
            self.b.output(output, value, shape)

    def mix(self, old: str, new: str, by: float = 0.9) -> str:
        """An average that moves."""
        return self.b.op("Add", self.scaled(old, by), self.scaled(new, 1 - by))

    def scaled(self, value: str, by: float) -> str:
        return self.b.op("Mul", value, self.b.const(by))

    def state(self) -> str:
        return self.b.small(f"state{len(self.b.inputs)}", SHAPE)

    def new(self, state: str, value: str) -> str:
        """Let a value replace a state."""
        self.meant[state] = f"new{len(self.outputs)}"
        self.outputs.append((self.meant[state], value, SHAPE))
        self.values.append(value)
        return value

    def extra(self) -> str:
        """A tensor that no output replaces: fed, or a constant."""
        if self.random.random() < 0.5:
            return self.b.input(f"fed{len(self.b.inputs)}", SHAPE)
        return self.b.const(self.b.generator.uniform(0.2, 0.9, SHAPE))

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def _update(self, parameter: str, gradient: str) -> None:
        op = self.b.op
        if self.chance(0.2):
            gradient = op("Add", gradient, self.scaled(parameter, 0.01))
        if self.chance(0.2):
            gradient = op("Mul", gradient, self.extra())
        if self.chance(0.2):
            gradient = op("Add", gradient, self.scaled(op("Sub", parameter, self.extra()), 0.1))
        self.values.append(gradient)
        update = self.random.choice(RULES)(self, parameter, gradient)
        self.values.append(update)
        new = op("Sub", parameter, op("Mul", update, self.rate))
        if self.chance(0.2):
            new = op("Mul", new, self.extra())
        if self.chance(0.5):
            self.random.choice(COPIES)(self, parameter, new)
        self.new(parameter, new)

    def _metric(self) -> None:
        op, one = self.b.op, self.b.const(0.5)
        inputs = [info.name for info in self.b.inputs if info.name not in ("x", "y")]
        value, other = (self.random.choice([*self.values, *inputs]) for _ in range(2))
        made = self.random.choice(
            [
                lambda: value,
                lambda: op("Mul", value, one),
                lambda: op("Abs", value),
                lambda: op("Sign", value),
                lambda: op("Clip", value, self.b.const(-0.5), one),
                lambda: op("Sub", value, other),
                lambda: op("Mul", value, other),
                lambda: op("Max", value, other),
                lambda: op("Where", op("Greater", op("Abs", other), one), value, self.b.const(0.0)),
            ]
        )()
        self.outputs.append((f"shown{len(self.outputs)}", made, SHAPE))


def plain(draw: Draw, parameter: str, gradient: str) -> str:
    return gradient


def momentum(draw: Draw, parameter: str, gradient: str) -> str:
    state = draw.state()
    return draw.new(state, draw.b.op("Add", draw.scaled(state, 0.9), gradient))


def adam(draw: Draw, parameter: str, gradient: str) -> str:
    op, first, second, most = draw.b.op, draw.state(), draw.state(), draw.state()
    mean = draw.new(first, draw.mix(first, gradient))
    square = draw.new(second, draw.mix(second, op("Mul", gradient, gradient)))
    top = draw.new(most, op("Max", most, square))
    return op("Div", mean, op("Add", op("Sqrt", top), draw.b.const(1e-3)))


def lion(draw: Draw, parameter: str, gradient: str) -> str:
    state = draw.state()
    draw.new(state, draw.mix(state, gradient, 0.99))
    return draw.b.op("Sign", draw.mix(state, gradient))


def old_gradient(draw: Draw, parameter: str, gradient: str) -> str:
    state = draw.state()
    draw.new(state, gradient)
    return draw.b.op("Sub", draw.scaled(gradient, 1.5), draw.scaled(state, 0.5))


def old_parameter(draw: Draw, parameter: str, gradient: str) -> str:
    state = draw.state()
    draw.new(state, parameter)
    return draw.b.op("Sub", gradient, draw.b.op("Sub", parameter, state))


def own_rates(draw: Draw, parameter: str, gradient: str) -> str:
    op, rates, old = draw.b.op, draw.state(), draw.state()
    sign = draw.scaled(op("Sign", op("Mul", gradient, old)), 0.1)
    draw.new(old, gradient)
    return op("Mul", gradient, draw.new(rates, op("Mul", rates, op("Add", draw.b.const(1.0), sign))))


def with_offset(draw: Draw, parameter: str, gradient: str) -> str:
    return draw.b.op("Add", gradient, draw.extra())


def averaged(draw: Draw, parameter: str, new: str) -> None:
    state = draw.state()
    draw.new(state, draw.mix(state, new))


def last_change(draw: Draw, parameter: str, new: str) -> None:
    draw.new(draw.state(), draw.b.op("Sub", new, parameter))


def largest(draw: Draw, parameter: str, new: str) -> None:
    state = draw.state()
    draw.new(state, draw.b.op("Max", state, new))


RULES: list[Rule] = [plain, momentum, adam, lion, old_gradient, old_parameter, own_rates, with_offset]
COPIES = [averaged, last_change, largest]


def root(model: ModelProto, name: str) -> str:
    """The value that a value is a copy of."""
    made = {output: node for node in model.graph.node for output in node.output}
    while name in made and made[name].op_type == "Identity":
        name = made[name].input[0]
    return name


def check(seed: int, metrics: bool, folder: Path) -> bool:
    """Assert that all pairs of a drawn step are meant; return whether it was accepted."""
    draw = Draw(seed, metrics)
    model = draw.b.model()
    path = folder / "step.onnx"
    path.write_bytes(model.SerializeToString())
    if not metrics:
        named = gopt.load(path, roles=RoleMap(states=draw.meant)).training.states
        assert {state.tensor: state.updated for state in named} == draw.meant
    try:
        states = gopt.load(path).training.states
    except (InputError, UnsupportedError):
        return False
    found = {state.tensor: root(model, state.updated) for state in states}
    assert found == {name: root(model, output) for name, output in draw.meant.items()}, f"seed {seed}"
    return True


@pytest.mark.parametrize("metrics", [False, True])
def test_pairs_of_drawn_steps_are_meant_or_refused(metrics, tmp_path):
    accepted = [seed for seed in range(60) if check(seed, metrics, tmp_path)]
    assert accepted
