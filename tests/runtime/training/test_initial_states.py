"""A rank's states at the first step: stored values first, then pieces of a user's tensors."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper
from runtime_graphs import make

from gopt.artifact.manifest import Piece
from gopt.artifact.manifest_entries import LocalState
from gopt.errors import InputError
from gopt.runtime.training.initial_states import initial_states

STATES = [LocalState("a", "y", (Piece("w", 4, 6), Piece("b", 0, 2))), LocalState("none", "z", ())]


@pytest.fixture
def graphs(tmp_path):
    nodes = [helper.make_node("Add", ["a", "a"], ["y"]), helper.make_node("Neg", ["none"], ["z"])]
    inputs, outputs = {"a": ("float32", [4]), "none": ("float32", [0])}, {"y": ("float32", [4]), "z": ("float32", [0])}
    return {"step": make(tmp_path, nodes, inputs, outputs)}


def test_pieces_of_tensors_become_a_state(graphs, tmp_path):
    path = str(tmp_path / "state.npz")
    np.savez(path, w=np.arange(6, dtype="f8").reshape(2, 3), b=np.array([7.0, 8.0]))
    found = initial_states(STATES, graphs, path)
    assert found["a"].dtype == np.float32 and found["a"].tolist() == [4, 5, 7, 8] and found["none"].shape == (0,)


def test_a_stored_value_goes_first_and_is_copied(tmp_path):
    stored = np.arange(4, dtype="f4")
    nodes = [helper.make_node("Neg", ["a"], ["y"])]
    graph = make(tmp_path, nodes, {"a": ("float32", [4])}, {"y": ("float32", [4])}, constants={"a": stored})
    found = initial_states(STATES[:1], {"step": graph}, None)["a"]
    assert found.tolist() == [0, 1, 2, 3] and found.flags.writeable and found.flags.owndata


@pytest.mark.parametrize("values", [None, {"b": np.zeros(2)}])
def test_a_tensor_without_a_value_is_named(values, graphs, tmp_path):
    path = None
    if values is not None:
        path = str(tmp_path / "state.npz")
        np.savez(path, **values)
    with pytest.raises(InputError, match="state 'w' has no value"):
        initial_states(STATES, graphs, path)
