"""The terms of gradients that a step adds up: a tied parameter has a term for each use."""

from __future__ import annotations

from gopt.analysis.training import TrainingGraph
from gopt.operators.kinds import ADDITIONS


def gradient_terms(training: TrainingGraph) -> dict[str, str]:
    """Return term -> gradient, for values of the gradient's type, added up to the gradient and read
    nowhere else, a sum before the terms. A gradient of another parameter and a result of the step are no terms."""
    graph = training.graph
    users = graph.users()
    sums = {name: name for name in training.gradients.values()}
    apart = {*sums, *graph.outputs}
    for node in reversed(graph.nodes):
        if not node.is_in(ADDITIONS) or (gradient := sums.get(node.outputs[0])) is None:
            continue
        for name in node.inputs:
            if len(users.get(name, ())) == 1 and name not in apart and graph.types.get(name) == graph.types[gradient]:
                sums[name] = gradient
    return {name: gradient for name, gradient in sums.items() if name not in apart}
