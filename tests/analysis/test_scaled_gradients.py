"""A factor of a gradient, or of a statistic, is not taken for the old value of what the product shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import Builder, perceptron

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError
from gopt.verification.verify import Verifier

SHAPE = (3, 5)
MASK = (np.arange(15).reshape(SHAPE) % 3 > 0).astype(np.float32)


def step(
    folder: Path, product: Callable[[Builder, str, str], str], held: str = "state", dtype: str = "float32"
) -> Path:
    """A perceptron under SGD that shows what ``product`` makes of a mask and the first gradient."""
    b = Builder()
    net = perceptron(b, (3, 5, 2), bias=False)
    if held == "input":
        mask = b.input("mask", SHAPE, dtype)
    else:
        mask = b.state("mask", MASK.astype(dtype)) if held == "state" else b.const(MASK, dtype)
    shown = product(b, mask, net.gradients["w0"])
    b.output("loss", net.loss, ())
    for name, dims in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(0.1))), dims)
    b.output("shown", shown, SHAPE, dtype)
    return b.save(folder / "step.onnx")


def times(b: Builder, mask: str, gradient: str) -> str:
    return b.op("Mul", mask, gradient)


def scaled(b: Builder, mask: str, gradient: str) -> str:
    return b.op("Div", b.op("Mul", b.op("Sign", gradient), b.op("Mul", mask, b.const(2.0))), b.const(3.0))


def opposite(b: Builder, mask: str, gradient: str) -> str:
    return b.op("Sub", b.op("Mul", b.op("Sub", b.const(1.0), mask), gradient), b.const(0.0))


def chosen(b: Builder, mask: str, gradient: str) -> str:
    return b.op("Where", b.op("Greater", mask, b.const(0.5)), gradient, b.const(np.zeros(SHAPE)))


def half(b: Builder, mask: str, gradient: str) -> str:
    return b.op("Mul", mask, b.op("Cast", gradient, to=onnx.TensorProto.FLOAT16))


@pytest.mark.parametrize("held", ["state", "input", "constant"])
@pytest.mark.parametrize("product", [times, scaled, opposite, chosen])
def test_a_masked_gradient_that_is_shown_is_not_the_masks_new_value(product, held, tmp_path):
    path = step(tmp_path, product, held)
    with pytest.raises(UnsupportedError, match=r"output .shown. is a product of .(mask|c\d+). and values of the batch"):
        gopt.load(path)


def test_in_half_precision_too(tmp_path):
    with pytest.raises(UnsupportedError, match="is a product of 'mask'") as refused:
        gopt.load(step(tmp_path, half, dtype="float16"))
    assert "a Constant node" in str(refused.value.hints)


def test_what_the_hint_names_settles_it(tmp_path):
    """Fed with the batch it is a batch; named, it is a state; the output of a Constant node is neither."""
    fed = step(tmp_path, times, "input")
    with pytest.raises(UnsupportedError) as refused:
        gopt.load(fed)
    assert "--batch mask" in str(refused.value.hints) and "--states mask=shown" in str(refused.value.hints)
    assert "mask" in gopt.load(fed, roles=RoleMap(batch=("mask",))).training.batch
    named = gopt.load(step(tmp_path, times), roles=RoleMap(states={"mask": "shown"}))
    assert [state.tensor for state in named.training.states] == ["w0", "w1", "mask"]
    model = onnx.load(step(tmp_path, times, "constant"))
    tensor = next(each for each in model.graph.initializer if list(each.dims) == list(SHAPE) and each.name[0] == "c")
    model.graph.initializer.remove(tensor)
    model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [tensor.name], value=tensor))
    onnx.save(model, tmp_path / "node.onnx")
    source = gopt.load(tmp_path / "node.onnx")
    assert source.training.metrics == ["shown"]
    gopt.shard(source, 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


def test_what_is_shown_by_a_fed_mask_may_be_left_out(tmp_path):
    """The zeros that stand for what is masked are taken for a state: the hint names the output, and it settles it."""
    path = step(tmp_path, chosen, "input")
    with pytest.raises(UnsupportedError, match="a value of one rank's own batch") as refused:
        gopt.load(path, roles=RoleMap(batch=("mask",)))
    assert any("if shown does not replace c" in hint and "out of the step" in hint for hint in refused.value.hints)


def test_one_hint_names_all_masks(tmp_path):
    b = Builder()
    net = perceptron(b, (3, 5, 2), bias=False)
    b.output("loss", net.loss, ())
    for name, dims in net.params.items():
        mask = b.input(f"{name}.mask", dims)
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(0.1))), dims)
        b.output(f"{name}.shown", b.op("Mul", mask, net.gradients[name]), dims)
    path = b.save(tmp_path / "step.onnx")
    with pytest.raises(UnsupportedError, match=r"output 'w0\.shown' \(and 1 other output\)") as refused:
        gopt.load(path)
    pairs, _, other = refused.value.hints
    assert "--states w0.mask=w0.shown,w1.mask=w1.shown" in pairs
    assert "--batch w0.mask,w1.mask if they are fed" in other
    assert gopt.load(path, roles=RoleMap(batch=("w0.mask", "w1.mask"))).training.metrics == ["w0.shown", "w1.shown"]


def gain(b: Builder, mask: str, gradient: str) -> str:
    """A rate for each weight that grows where the gradient is positive: old · (1 + 0.1 · sign)."""
    return b.op("Mul", mask, b.op("Add", b.const(1.0), b.op("Mul", b.op("Sign", gradient), b.const(0.1))))


def previous(b: Builder, mask: str, gradient: str) -> str:
    """Rprop's last gradient, or zero where its sign turned."""
    turned = b.op("Less", b.op("Mul", mask, gradient), b.const(0.0))
    return b.op("Where", turned, b.const(np.zeros(SHAPE)), gradient)


def momentum(b: Builder, mask: str, gradient: str) -> str:
    return b.op("Add", b.op("Mul", mask, b.const(0.9)), b.op("Mul", gradient, gradient))


@pytest.mark.parametrize("product", [gain, previous, momentum])
def test_states_that_are_multiplied_stay_states(product, tmp_path):
    source = gopt.load(step(tmp_path, product))
    assert {state.tensor: state.of for state in source.training.states}["mask"] == "w0"
    gopt.shard(source, 2).write(tmp_path / "out")
    assert Verifier(tmp_path / "out").run(steps=2).equal


def shown_of_the_batch(folder: Path, running: bool) -> Path:
    """Class weights times a mean by class, shown; or a running mean of it."""
    b = Builder()
    net = perceptron(b, (3, 5, 2), bias=False)
    held = b.state("held", np.array([0.5, 2.0], np.float32))
    mean = b.op("ReduceMean", b.op("Abs", "y"), b.const([0], "int64"), keepdims=0)
    if running:
        shown = b.op("Add", b.op("Mul", held, b.const(0.9)), b.op("Mul", mean, b.const(0.1)))
    else:
        shown = b.op("Mul", held, mean)
    b.output("loss", net.loss, ())
    for name, dims in net.params.items():
        b.output(f"{name}_out", b.op("Sub", name, b.op("Mul", net.gradients[name], b.const(0.1))), dims)
    b.output("shown", shown, (2,))
    return b.save(folder / "step.onnx")


def test_weights_of_a_metric_are_not_its_running_mean(tmp_path):
    with pytest.raises(UnsupportedError, match="is a product of 'held'"):
        gopt.load(shown_of_the_batch(tmp_path, running=False))
    states = gopt.load(shown_of_the_batch(tmp_path, running=True)).training.states
    assert [state.kind.value for state in states if state.tensor == "held"] == ["statistic"]
