"""A rank's graph with copies between a device and its host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gopt.ir.graph import Graph
from gopt.ir.host_copies import FileNodes, with_copies
from gopt.records.host_values import HostValues

ON_DEVICE = HostValues()
"""Nothing is on the host."""


def with_host(graph: Graph, host: HostValues, replaces: Mapping[str, str]) -> tuple[Graph, frozenset[str]]:
    """A graph with copies, and the values of it in the memory of the host. ``replaces``: output -> state."""
    states = {state: output for output, state in replaces.items() if state in set(host.states)}

    def nbytes(name: str) -> int:
        type = graph.type_of(name)
        return type.nbytes if type.static else 0

    step = with_copies(FileNodes(graph.nodes, graph.inputs, graph.outputs), states, host.activations, nbytes)
    types = graph.types | {new: graph.types[old] for new, old in step.original.items() if old in graph.types}
    return replace(graph, nodes=step.nodes, types=types), frozenset(step.on_host)
