"""States of one element beside losses that look like them."""

from __future__ import annotations

import onnx
import pytest
from whole_gen.derivatives import gradients
from whole_gen.forwards import parameter, squares
from whole_gen.writer import Writer

import gopt
from gopt.analysis.role_map import RoleMap


@pytest.mark.parametrize("stored", [True, False])
def test_the_weight_of_a_second_loss_is_no_state(stored, tmp_path):
    """It was asked whether the second loss is its new value."""
    w = Writer(2, 4)
    x, weight = w.fed("x", [3]), w.setting("weight", 0.5)
    p, q = parameter(w, "a", 3, 2), parameter(w, "c", 3, 1)
    first = squares(w, w.op("Tanh", x @ p), w.fed("y", [2]))
    second = squares(w, w.op("Tanh", x @ q), w.fed("r", [1])) * weight
    found = [gradients(loss, [each])[0] for loss, each in ((first, p), (second, q))]
    w.out("first", first)
    w.out("second", second)
    for each, gradient in zip((p, q), found):
        w.becomes(each, each - gradient * 0.1)
    if not stored:
        w.stored = {name: value for name, value in w.stored.items() if name not in w.states}
    onnx.save(w.model(), tmp_path / "step.onnx")
    roles = RoleMap() if stored else RoleMap(loss="first,second")  # nothing tells a weight from a state then
    training = gopt.load(tmp_path / "step.onnx", roles=roles).training
    assert training.losses == ("first", "second") and training.hyper == ["weight"]
    assert {state.tensor for state in training.states} == {"a", "c"}
