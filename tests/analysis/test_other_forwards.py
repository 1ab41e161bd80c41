"""Forwards that are not the one in front of the update."""

from __future__ import annotations

import re

import onnx
import pytest
from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter, squares
from whole_gen.writer import Value, Writer

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError


def layer(w: Writer, x: Value, p: Value, y: Value) -> Value:
    return squares(w, w.op("Tanh", x @ p), y)


def load(w: Writer, folder, **roles):
    onnx.save(w.model(), folder / "step.onnx")
    return gopt.load(folder / "step.onnx", roles=RoleMap(**roles)).training


def moved(w: Writer, loss: Value, p: Value) -> Value:
    return p - gradients(loss, [p])[0] * 0.1


def test_a_forward_of_new_values_that_updates_nothing_is_a_metric(tmp_path):
    w = Writer(1, 4)
    x, y, p = w.fed("x", [3]), w.fed("y", [2]), parameter(w, "a", 3, 2)
    loss = layer(w, x, p, y)
    new = moved(w, loss, p)
    w.out("loss", loss)
    w.out("after", layer(w, x, new, y))
    w.becomes(p, new)
    training = load(w, tmp_path)
    assert training.losses == ("loss",) and training.metrics == ["after"]


@pytest.mark.parametrize("known", [True, False], ids=["batch", "setting"])
def test_a_network_whose_loss_is_not_shown(known, tmp_path):
    """Its parameters passed for statistics, and the data that it alone reads for settings."""
    w = Writer(1, 4)
    x, y, p, q = w.fed("x", [3]), w.fed("y", [2]), parameter(w, "a", 3, 2), parameter(w, "c", 3, 1)
    loss, own = layer(w, x, p, y), layer(w, x if known else w.fed("u", [3]), q, w.fed("r", [1]))
    w.out("loss", loss)
    w.becomes(p, moved(w, loss, p))
    w.becomes(q, moved(w, own, q))
    fed = "x" if known else "u"
    with pytest.raises(UnsupportedError, match=f"'c' is multiplied with '{fed}' at .*, and 'c' is updated") as caught:
        load(w, tmp_path)
    assert caught.value.hints[0] == "make the loss that it ends in an output of the step, one floating number"
    w.out("own", own)  # what the hint says
    assert load(w, tmp_path).losses == ("loss", "own")


def test_data_of_a_loss_that_is_not_shown_can_be_named(tmp_path):
    w = Writer(1, 4)
    p, y = parameter(w, "a", 3, 2), w.fed("y", [2])
    loss, other = layer(w, w.fed("x", [3]), p, y), layer(w, w.fed("u", [3]), p, y)
    w.out("loss", loss)
    one, two = gradients(loss, [p])[0], gradients(other, [p])[0]
    w.becomes(p, p - (one + two) * 0.1)
    with pytest.raises(UnsupportedError, match="'a' is multiplied with 'u'") as caught:
        load(w, tmp_path)
    option = re.search("--batch (.*)", caught.value.hints[1])
    assert option is not None and set(load(w, tmp_path, batch=[option.group(1)]).batch) == {"x", "y", "u"}
