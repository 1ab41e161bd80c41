"""Required placements of a step's results, given its states: the target of propagation and of the check."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.analysis.training import TrainingGraph
from gopt.records.placements import REPLICATED, Placement


def result_placements(training: TrainingGraph, states: Mapping[str, Placement]) -> dict[str, Placement]:
    """Return result -> required placement: a new state has the old state's, a gradient the parameter's.

    This alone decides whether a gradient is summed over members. Loss and metrics are whole; so is a gradient of
    several parameters that are not split alike.
    """
    wanted = {state.updated: states.get(state.tensor, REPLICATED) for state in training.states}
    wanted |= dict.fromkeys(training.shown, REPLICATED)
    gradients: dict[str, Placement] = {}
    for name, value in training.gradients.items():
        placement = states.get(name, REPLICATED)
        gradients[value] = placement if gradients.get(value, placement) == placement else REPLICATED
    return wanted | gradients
