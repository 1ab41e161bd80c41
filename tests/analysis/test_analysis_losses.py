"""Which scalars are losses: those from which a backward starts."""

from __future__ import annotations

import onnx
import pytest
from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter, squares
from whole_gen.writer import Value, Writer

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.analysis.training import TrainingGraph
from gopt.errors import InputError, OptionError, UnsupportedError


def trained(w: Writer, loss: Value, *names: str, shown: str = "") -> list[Value]:
    """Parameters, each of one layer, moved along their gradients of a loss."""
    states = [Value(w, name, w.inputs[name]) for name in names]
    found = gradients(loss, [next(v for r in w.tape for v in r.inputs if v and v.name == s.name) for s in states])
    for state, gradient in zip(states, found):
        w.becomes(state, state - gradient * 0.1)
    if shown:
        w.out(shown, loss)
    return found


def load(w: Writer, folder, **roles) -> TrainingGraph:
    onnx.save(w.model(), folder / "step.onnx")
    return gopt.load(folder / "step.onnx", roles=RoleMap(**roles)).training


def two(w: Writer) -> tuple[Value, Value]:
    """The losses of two networks of one layer."""
    x = w.fed("x", [3])
    first = squares(w, w.op("Tanh", x @ parameter(w, "a", 3, 2)), w.fed("y", [2]))
    second = squares(w, w.op("Tanh", x @ parameter(w, "c", 3, 1)), w.fed("r", [1]))
    return first, second


def test_two_losses_are_found_in_the_order_of_the_file(tmp_path):
    w = Writer(1, 4)
    first, second = two(w)
    trained(w, second, "c", shown="second")
    trained(w, first, "a", shown="first")
    training = load(w, tmp_path)
    assert training.losses == tuple(name for name in w.outputs if name in ("first", "second"))
    assert training.loss == training.losses[0] and not training.metrics
    assert set(training.gradients) == {"a", "c"} and set(training.batch) == {"x", "y", "r"}
    of = {name: training.sources[value] for name, value in training.gradients.items()}
    assert of == {"a": {"first"}, "c": {"second"}}


def test_the_sum_of_shown_losses_is_the_loss(tmp_path):
    w = Writer(1, 4)
    first, second = two(w)
    total = first + second
    trained(w, total, "a", "c", shown="total")
    w.out("first", first)
    w.out("second", second)
    training = load(w, tmp_path)
    assert training.losses == ("total",) and set(training.metrics) == {"first", "second"}


def test_a_function_that_no_gradient_comes_from_is_a_metric(tmp_path):
    """It reads values of its own, which the backward does not."""
    w = Writer(1, 4)
    x, y = w.fed("x", [3]), w.fed("y", [2])
    out = w.op("Tanh", x @ parameter(w, "a", 3, 2))
    loss = -(w.op("LogSoftmax", out, axis=-1) * y).mean()
    w.out("entropy", -(w.op("Exp", out) * out).mean())
    trained(w, loss, "a", shown="loss")
    training = load(w, tmp_path)
    assert training.losses == ("loss",) and training.metrics == ["entropy"]


def test_named_losses_are_all_losses(tmp_path):
    w = Writer(1, 4)
    first, second = two(w)
    trained(w, first, "a", shown="first")
    trained(w, second, "c", shown="second")
    assert load(w, tmp_path, loss="second,first").losses == ("second", "first")
    assert load(w, tmp_path, loss=["first", "second"]).losses == ("first", "second")
    with pytest.raises(UnsupportedError, match="does not come from 'first', but from 'second'") as caught:
        load(w, tmp_path, loss="first")
    assert caught.value.hints == ("name all losses: --loss first,second, or leave --loss out",)


def test_what_is_computed_from_gradients_is_no_loss(tmp_path):
    w = Writer(1, 4)
    first, second = two(w)
    found = trained(w, first, "a", shown="first") + trained(w, second, "c", shown="second")
    w.out("norm", (found[0] * found[0]).sum() + (found[1] * found[1]).sum())
    training = load(w, tmp_path)
    assert set(training.losses) == {"first", "second"} and training.metrics == ["norm"]
    with pytest.raises(OptionError, match="'norm' cannot be a loss: it is computed from gradients") as caught:
        load(w, tmp_path, loss="first,second,norm")
    assert caught.value.hints == ("leave it out: --loss first,second",)


def test_a_norm_of_gradients_alone_is_no_loss(tmp_path):
    """The forward was everything up to the norm, and gradients were taken behind a part of their own update."""
    w = Writer(1, 4)
    first, _ = two(w)
    found = trained(w, first, "a")
    w.out("norm", (found[0] * found[0]).sum().sqrt())
    with pytest.raises(InputError, match="no loss found: output 'norm' is computed from gradients"):
        load(w, tmp_path)


def test_losses_of_single_samples_are_no_loss(tmp_path):
    """The hint asked to name one with --loss, which takes one number alone."""
    w = Writer(1, 4)
    first, _ = two(w)
    trained(w, first, "a")
    w.out("each", w.fed("z", [2]).sum(1))
    with pytest.raises(InputError, match="no output of one floating element depends on the batch") as caught:
        load(w, tmp_path)
    (hint,) = caught.value.hints
    assert hint == "make the loss an output of the step, one floating number, such as the mean of 'each'"
