"""Finds values computed from states alone with respect to which the loss may be differentiated: computed weights.

With weight norm, a softplus around a parameter, a low-rank sum, or a half copy, the update runs through the gradient
of what the forward really uses. That value depends on no batch, so that its gradient may be averaged as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gopt.ir.graph import Graph
from gopt.ir.types import FLOATS

TRIES = 4


def computed_weights(
    graph: Graph, losses: Sequence[str], batch: set[str], parameter: str, dims: tuple[int, ...]
) -> list[str]:
    """Values with as many elements as ``dims`` that no batch reaches and a loss reads: equal shapes first, then
    nearest the losses first. They follow the parameter; where no loss reads it, others and inputs count."""
    elements = int(np.prod(dims, dtype=np.int64))
    live = read_by(graph, losses)
    with_batch, with_parameter = reached(graph, batch), reached(graph, {parameter})
    apart = parameter not in live
    names = [name for node in graph.nodes for name in node.outputs] + list(graph.inputs)
    found = []
    for place, name in enumerate(names):
        type = graph.type_of(name) if name not in graph.inputs else graph.inputs[name]
        if name not in live or name in with_batch or name == parameter or type.dtype not in FLOATS:
            continue
        if type.static and type.elements == elements and (apart or name in with_parameter):
            found.append((type.dims != dims, -place, name))
    return [name for *_, name in sorted(found)][:TRIES]


def shifted(graph: Graph, gradients: Mapping[str, str], batch: set[str]) -> dict[str, str]:
    """Parameter -> the sum or difference of it and something of the batch, on which its gradient depends.

    That is where sharpness-aware steps take their second gradient.
    """
    with_batch = reached(graph, batch)
    found: dict[str, str] = {}
    for node in graph.nodes:
        if not node.is_a("Add", "Sub") or node.outputs[0] not in with_batch:
            continue
        for name in node.inputs:
            same = name in gradients and graph.type_of(node.outputs[0]).shape == graph.inputs[name].shape
            if same and name not in found and gradients[name] in reached(graph, {node.outputs[0]}):
                found[name] = node.outputs[0]
    return found


def dependent_values(graph: Graph, name: str, batch: set[str], elements: int) -> list[str]:
    """Values that the batch reaches and ``name`` depends on, with that many elements, nearest first."""
    live, with_batch = read_by(graph, [name]), reached(graph, batch)
    made = [output for node in reversed(graph.nodes) for output in node.outputs if output in live & with_batch]
    types = ((each, graph.type_of(each)) for each in made if each != name)
    return [each for each, type in types if type.static and type.elements == elements and type.dtype in FLOATS]


def reached(graph: Graph, starts: set[str]) -> set[str]:
    reached = set(starts)
    for node in graph.nodes:
        if not reached.isdisjoint(node.reads):
            reached.update(name for name in node.outputs if name)
    return reached


def read_by(graph: Graph, values: Iterable[str]) -> set[str]:
    live = set(values)
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.reads)
    return live
