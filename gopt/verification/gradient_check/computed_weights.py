"""Finds values computed from states alone with respect to which the loss may be differentiated: computed weights.

With weight norm, a softplus around a parameter, a low-rank sum, or a half copy, the update runs through the gradient of
the value used by the forward. This value depends on no batch, so that the gradient may be averaged as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from gopt.ir.graph import Graph
from gopt.ir.types import FLOATS
from gopt.operators.kinds import SUMS, VIEWS

TRIES = 4


def computed_weights(
    graph: Graph, losses: Sequence[str], batch: set[str], parameter: str, dims: tuple[int, ...]
) -> list[str]:
    """Values with as many elements as ``dims`` that no batch reaches and a loss reads: equal shapes first, then nearest
    the losses first. The values follow the parameter, and are no views of it; for a parameter unread by losses, others
    and inputs count."""
    elements = int(np.prod(dims, dtype=np.int64))
    live = read_by(graph, losses)
    with_batch, with_parameter = reached(graph, batch), reached(graph, {parameter})
    views = {parameter}
    for node in graph.nodes:
        views.update(node.outputs if node.is_in(VIEWS) and node.inputs[0] in views else ())
    apart = parameter not in live
    names = [name for node in graph.nodes for name in node.outputs] + list(graph.inputs)
    ranked = []
    for index, name in enumerate(names):
        type = graph.type_of(name) if name not in graph.inputs else graph.inputs[name]
        if name not in live or name in with_batch or name in views or type.dtype not in FLOATS:
            continue
        if type.static and type.elements == elements and (apart or name in with_parameter):
            ranked.append((type.dims != dims, -index, name))
    return [name for *_, name in sorted(ranked)][:TRIES]


def shifted(graph: Graph, gradients: Mapping[str, str], batch: set[str]) -> dict[str, str]:
    """Parameter -> the sum or difference of parameter and a value of the batch, if the gradient depends on it.

    Sharpness-aware steps take their second gradient there."""
    with_batch = reached(graph, batch)
    shifts: dict[str, str] = {}
    for node in graph.nodes:
        if not node.is_in(SUMS) or node.outputs[0] not in with_batch:
            continue
        for name in node.inputs:
            fits = name in gradients and graph.type_of(node.outputs[0]).shape == graph.inputs[name].shape
            if fits and name not in shifts and gradients[name] in reached(graph, {node.outputs[0]}):
                shifts[name] = node.outputs[0]
    return shifts


def dependent_values(graph: Graph, name: str, batch: set[str], elements: int) -> list[str]:
    """Values that depend on the batch and lead to ``name``, with so many elements, nearest first."""
    live, with_batch = read_by(graph, [name]), reached(graph, batch)
    values = [output for node in reversed(graph.nodes) for output in node.outputs if output in live & with_batch]
    types = ((value, graph.type_of(value)) for value in values if value != name)
    return [value for value, type in types if type.static and type.elements == elements and type.dtype in FLOATS]


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
