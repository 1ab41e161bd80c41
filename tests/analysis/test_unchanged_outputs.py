"""Outputs made of an input of their type alone: refused where neither the file nor the user says what they are."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import Builder, perceptron, sgd

import gopt
from gopt.analysis.role_map import RoleMap
from gopt.errors import UnsupportedError


def shown(tmp_path, op_type: str):
    """A step with an output that is ``op_type`` of the batch."""
    b = Builder()
    sgd(b, perceptron(b))
    b.output("shown", b.op(op_type, "x"), (4, 3))
    return b.save(tmp_path / "step.onnx")


@pytest.mark.parametrize(("op_type", "words"), [("Identity", "unchanged"), ("Neg", "as other states have")])
def test_an_output_of_a_batch_is_refused(op_type, words, tmp_path):
    with pytest.raises(UnsupportedError, match=words) as found:
        gopt.load(shown(tmp_path, op_type))
    assert "'x'" in found.value.message and "--batch x" in found.value.hints[0]


@pytest.mark.parametrize("op_type", ["Identity", "Neg"])
def test_the_user_says_what_it_is(op_type, tmp_path):
    path = shown(tmp_path, op_type)
    assert "x" in gopt.load(path, roles=RoleMap(batch=("x",))).training.batch
    kept = gopt.load(path, roles=RoleMap(states={"x": "shown"})).training.states
    assert "x" in {state.tensor for state in kept}


def test_a_frozen_parameter_with_a_value_is_a_state(tmp_path):
    b = Builder()
    sgd(b, perceptron(b))
    b.output("kept", b.op("Identity", b.state("frozen", np.ones(3, np.float32))), (3,))
    assert "frozen" in {state.tensor for state in gopt.load(b.save(tmp_path / "step.onnx")).training.states}
