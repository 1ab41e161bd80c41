"""States that hold no moment of a gradient: another state, a copy of the parameter, the gradient itself."""

from pathlib import Path

import numpy as np
import pytest
from helpers import Builder, perceptron, sgd
from products import spread

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.api import Source
from gopt.errors import UnsupportedError
from gopt.verification.verify import Verifier

SHAPE = (3, 4)


def save(folder: Path, kind: str) -> Source:
    """A step in which ``w0`` has such a state, with all its pairs named."""
    b = Builder()
    net = perceptron(b, (3, 4, 2))
    sgd(b, net, skip=["w0"])
    gradient = net.gradients["w0"]
    new = b.op("Sub", "w0", b.op("Mul", gradient, b.const(0.1)))
    names = {"line": ["a", "c"], "copy": ["c"], "before": ["p"], "gradient": ["g"]}[kind]
    for name in names:
        b.state(name, np.full(SHAPE, 0.5, np.float32))
    if kind == "line":  # a takes the old value of c, which is a moment
        b.output("a_out", b.op("Identity", "c"), SHAPE)
        b.output("c_out", b.op("Add", b.op("Mul", "a", b.const(0.9)), gradient), SHAPE)
    elif kind == "copy":
        b.output("c_out", b.op("Identity", new), SHAPE)
    elif kind == "gradient":  # the one before: optimistic descent
        b.output("g_out", gradient, SHAPE)
        way = b.op("Sub", b.op("Mul", gradient, b.const(2.0)), "g")
        new = b.op("Sub", "w0", b.op("Mul", way, b.const(0.1)))
    else:  # the parameter before the step: heavy ball
        b.output("p_out", b.op("Identity", "w0"), SHAPE)
        new = b.op("Add", new, b.op("Mul", b.op("Sub", "w0", "p"), b.const(0.5)))
    b.output("w0_out", new, SHAPE)
    pairs = {name: f"{name}_out" for name in ("w0", *names)}
    return gopt.load(b.save(folder / "step.onnx"), roles=RoleMap(states=pairs))


@pytest.mark.parametrize(
    ("kind", "stage", "micro_steps"), spread(["line", "copy", "before", "gradient"], [0, 1, 2, 3], [1, 2])
)
def test_the_ranks_are_equal(kind, stage, micro_steps, tmp_path):
    gopt.shard(save(tmp_path, kind), 2, stage=stage, accumulate=micro_steps).write(tmp_path / "out")
    result = Verifier(tmp_path / "out").run(confirm=False)
    assert result.equal, result.to_json()


def test_a_state_of_a_state_has_its_owner(tmp_path):
    training = save(tmp_path, "line").training
    assert {state.tensor: state.of for state in training.states if state.of} == {"a": "w0", "c": "w0"}


def test_a_value_of_the_backward_is_not_kept(tmp_path):
    """It is nobody's gradient: what the step of a large batch would keep of it is not said."""
    b = Builder()
    net = perceptron(b, (3, 4, 2))
    sgd(b, net)
    delta = next(node.input[0] for node in b.nodes if net.gradients["b1"] in node.output)
    b.state("d", np.zeros((4, 2), np.float32))
    b.output("d_out", delta, (4, 2))
    with pytest.raises(UnsupportedError, match="state 'd' follows the backward"):
        gopt.load(b.save(tmp_path / "step.onnx"), roles=RoleMap(states={"d": "d_out"}))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_weight_without_a_gradient_that_follows_another_parameter(stage, tmp_path):
    """All ranks hold it, so all of them run the update that it is made by."""
    b = Builder()
    net = perceptron(b, (3, 2))
    sgd(b, net, skip=["w0"])
    b.output("w0_out", b.op("Sub", "w0", "b0"), (3, 2))
    gopt.shard(gopt.load(b.save(tmp_path / "step.onnx")), 3, stage=stage).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal
