"""Values made of the states alone, in whose place a loss may be differentiated: a weight that is computed.

With weight norm, a softplus around a parameter, a low-rank sum, or a half copy, the update runs through the gradient
of what the forward really uses. That value depends on no batch, so that its gradient may be averaged as well.
"""

from __future__ import annotations

import numpy as np

from gopt.graph.model import Graph
from gopt.graph.types import FLOATS

TRIES = 6


def seams(graph: Graph, loss: str, batch: set[str], parameter: str, dims: tuple[int, ...]) -> list[str]:
    """Values with as many elements as ``dims`` that no batch reaches and the loss reads, ones that follow the
    parameter first, equal shapes first, nearest the loss first. Inputs count."""
    elements = int(np.prod(dims, dtype=np.int64))
    live = _read_by(graph, loss)
    with_batch, with_parameter = _reached(graph, batch), _reached(graph, {parameter})
    names = [name for node in graph.nodes for name in node.outputs] + list(graph.inputs)
    found = []
    for place, name in enumerate(names):
        type = graph.type_of(name) if name not in graph.inputs else graph.inputs[name]
        if name not in live or name in with_batch or name == parameter or type.dtype not in FLOATS:
            continue
        if type.static and type.elements == elements and name not in graph.initializers.keys() - graph.inputs.keys():
            found.append((name not in with_parameter, type.dims != dims, -place, name))
    return [name for *_, name in sorted(found)][:TRIES]


def _reached(graph: Graph, starts: set[str]) -> set[str]:
    reached = set(starts)
    for node in graph.nodes:
        if not reached.isdisjoint(node.reads):
            reached.update(name for name in node.outputs if name)
    return reached


def _read_by(graph: Graph, loss: str) -> set[str]:
    live = {loss}
    for node in reversed(graph.nodes):
        if not live.isdisjoint(node.outputs):
            live.update(node.reads)
    return live
