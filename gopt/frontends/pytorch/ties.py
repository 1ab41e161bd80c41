"""Equal values at the end of the elements of a TopK: the choice among equals is open, and PyTorch's may be another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from gopt.ir.graph import Graph
from gopt.operators.kinds import ORDERED
from gopt.runtime.executor import Executor
from gopt.runtime.session import SessionCache


def ties(graph: Graph, read: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Yield a hint for each TopK of a graph with such values; ``read``: the inputs of a step."""
    nodes = [node for node in graph.nodes if node.is_in(ORDERED) and graph.type_of(node.outputs[0]).static]
    if not nodes:
        return
    shown = {node.inputs[0]: graph.type_of(node.inputs[0]) for node in nodes}
    values = Executor(replace(graph, outputs=shown), SessionCache()).run(dict(read))
    for node in nodes:
        axis = int(node.attributes.get("axis", -1))
        rows = np.moveaxis(values[node.inputs[0]], axis, -1)
        count, size = graph.type_of(node.outputs[0]).dims[axis], rows.shape[-1]
        if not 0 < count < size:
            continue
        last = size - count if node.attributes.get("largest", 1) else count
        ordered = np.sort(rows, -1)
        tied = ordered[..., last - 1] == ordered[..., last]
        if tied.any():
            yield (
                f"{int(tied.sum())} of {tied.size} rows of {node.inputs[0]!r} have equal values at the end of the "
                f"top {count}: the choice among equals is open, and PyTorch's is another (a router starting with "
                "zeros): start with other values"
            )
