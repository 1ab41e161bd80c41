"""Parameters read by trainers through casts to half precision alone: pulled in this type, without a cast."""

from __future__ import annotations

from gopt.analysis.parameter_uses import low_precision_uses
from gopt.analysis.training import TrainingGraph
from gopt.ir.graph import Node
from gopt.parameter_server.node_placement import NodePlacement
from gopt.parameter_server.options import SplitOptions


def narrow_types(training: TrainingGraph, placement: NodePlacement, options: SplitOptions) -> dict[str, str]:
    """Parameter -> the type of the casts of all readers on trainers; empty if another type travels."""
    names = placement.pulled & training.gradients.keys()
    new = {state.updated: state.tensor for state in training.states if state.tensor in names}
    readers: dict[str, list[Node]] = {}
    for node in training.graph.nodes:
        for name in dict.fromkeys(node.reads):
            readers.setdefault(name, []).append(node)
    mine = {id(node) for node in placement.trainer_nodes}
    wide = {new[name] for node in placement.trainer_nodes for name in node.reads if name in new}
    types: dict[str, str] = {}
    for name in sorted(names - wide):
        casts = [node for node in readers.get(name, ()) if id(node) in mine]
        plain = all(cast.outputs[0] in reader.inputs for cast in casts for reader in readers.get(cast.outputs[0], ()))
        dtype = low_precision_uses(training, casts)
        if dtype and plain and options.wire in ("", dtype):
            types[name] = dtype
    return types
