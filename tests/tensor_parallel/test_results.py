"""How results of a step must be placed."""

from __future__ import annotations

from dataclasses import replace

from helpers import source

from gopt.records.placements import REPLICATED, Shard
from gopt.tensor_parallel.results import result_placements


def test_new_states_and_gradients_are_placed_as_their_parameters():
    training = source("mlp_sgd").training
    rows = Shard(0, (32, 32))
    wanted = result_placements(training, {"fc1.weight": rows})
    state = training.state_of()["fc1.weight"]
    assert wanted[state.updated] == wanted[training.gradients["fc1.weight"]] == rows
    assert wanted[training.loss] == wanted[training.gradients["fc2.bias"]] == REPLICATED


def test_a_gradient_of_parameters_that_are_not_split_alike_is_whole():
    training = source("mlp_sgd").training
    gradient = training.gradients["fc1.weight"]
    shared = replace(training, gradients={"fc1.weight": gradient, "fc2.weight": gradient})
    rows = Shard(0, (32, 32))
    assert result_placements(shared, {"fc1.weight": rows})[gradient] == REPLICATED
    assert result_placements(shared, {"fc1.weight": rows, "fc2.weight": rows})[gradient] == rows
