"""Values of states unread by the next step: an update that begins anew while a counter is zero."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gopt.analysis.training import StateKind, TrainingGraph
from gopt.errors import InputError
from gopt.ir.graph import Node
from gopt.ir.graph_index import GraphIndex, walk
from gopt.ir.node_kinds import chosen_by, record_of
from gopt.ir.tensor import Tensor
from gopt.text.sanitize import show


def refuse_unused(training: TrainingGraph, values: Mapping[str, Tensor], file: str) -> None:
    """Raise InputError for a loaded optimizer state, unread while a scalar state is zero, if that scalar is zero.

    ``gopt export`` writes such updates: ``Where(started == 0, first step, later step)``, where the first step makes the
    optimizer's states anew. ``values``: the values of ``file``, by state.
    """
    graph, index = training.graph, GraphIndex(training.graph)
    for state in training.states:
        if state.tensor not in values or state.kind is not StateKind.OPTIMIZER_STATE:
            continue
        choice = index.producers.get(state.updated)
        if choice is None or not chosen_by(choice):
            continue
        count = _compared_with_zero(index.producers.get(choice.inputs[0]), training)
        value = values.get(count) or graph.initializers.get(count)
        if value is None or np.any(value.numpy()):
            continue
        if choice.inputs[1] not in walk([state.tensor], index.results):
            raise InputError(
                f"{file}: {show(state.tensor)} would not be read: {show(count)} is 0, and then the step initializes it",
                f"give {show(count)} as 1 in the file, or leave the states of the optimizer out",
            )


def _compared_with_zero(node: Node | None, training: TrainingGraph) -> str:
    """The scalar state compared with zero by a node, or ''."""
    if node is None or record_of(node).relation != "==":
        return ""
    scalars = {state.tensor for state in training.states if state.kind is StateKind.SCALAR}
    for name, operand in (node.inputs, node.inputs[::-1]):
        zero = training.graph.initializers.get(operand)
        if name in scalars and operand not in scalars and zero is not None and not np.any(zero.numpy()):
            return name
    return ""
