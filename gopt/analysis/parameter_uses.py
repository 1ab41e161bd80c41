"""Finds the parameters read by forward and backward, and the dtype of each read, from the source before any pass."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.analysis.training import Phase, TrainingGraph
from gopt.ir.graph import Node
from gopt.ir.node_kinds import reads_value
from gopt.ir.types import LOW_PRECISION, nbytes
from gopt.operators.kinds import CASTS


def parameter_users(training: TrainingGraph) -> dict[str, list[Node]]:
    """Parameter -> readers in forward and backward, in order; found once for a training, and not to be changed."""
    return training.once("parameter users", lambda: _users(training))


def _users(training: TrainingGraph) -> dict[str, list[Node]]:
    names = {state.tensor for state in training.parameters}
    users: dict[str, list[Node]] = {}
    for node in training.graph.nodes:
        if node.phase is Phase.UPDATE or (names.isdisjoint(node.inputs) and not node.captures):
            continue
        for name in dict.fromkeys(node.reads):
            if name in names:
                users.setdefault(name, []).append(node)
    return users


def low_precision_uses(training: TrainingGraph, nodes: Sequence[Node]) -> str:
    """The low-precision type to which all readers cast a parameter inside the step; '' with any other reader."""
    types, outputs = training.graph.types, training.graph.outputs
    if not nodes or not all(node.is_in(CASTS) and node.outputs[0] not in outputs for node in nodes):
        return ""
    master, copies = types[nodes[0].inputs[0]].dtype, {types[node.outputs[0]].dtype for node in nodes}
    return copies.pop() if len(copies) == 1 and copies <= LOW_PRECISION and master not in LOW_PRECISION else ""


def trained_bytes(training: TrainingGraph) -> tuple[int, int]:
    """Bytes of all gradients as the backward makes them, and of the trained parameters as read by forward and backward:
    in the type of the low-precision copy where all readers cast, and 0 where only the shape is read."""
    types = training.graph.types
    gradients = sum(types[name].nbytes for name in set(training.gradients.values()))
    users, parameters = parameter_users(training), 0
    for name in training.gradients:
        nodes = [node for node in users.get(name, ()) if reads_value(node, name)]
        if nodes:
            parameters += nbytes(low_precision_uses(training, nodes) or types[name].dtype, types[name].elements)
    return gradients, parameters
