"""How the results of a step must be placed, given its states: what propagation aims at and the check asks for."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.analysis.training import TrainingGraph
from gopt.sharding.placements import REPLICATED, Placement


def result_placements(training: TrainingGraph, states: Mapping[str, Placement]) -> dict[str, Placement]:
    """Result of the step -> its placement: a new state has that of the old one, a gradient that of its parameter.

    By that alone a gradient is summed over members, or not. Loss and metrics are whole; so is a gradient that is of
    parameters which are not split alike.
    """
    wanted = {state.updated: states.get(state.tensor, REPLICATED) for state in training.states}
    wanted |= dict.fromkeys((training.loss, *training.metrics), REPLICATED)
    gradients: dict[str, Placement] = {}
    for name, value in training.gradients.items():
        placement = states.get(name, REPLICATED)
        gradients[value] = placement if gradients.get(value, placement) == placement else REPLICATED
    return wanted | gradients
