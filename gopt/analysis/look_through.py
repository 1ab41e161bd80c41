"""A graph as role recovery sees the source: collectives look like operators of known behaviour.

A call over axes that see different data hands a gradient on (element by element); a call over other axes belongs to the
model and moves data, so that the result is the gradient and not the operand."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gopt.analysis.training import Phase, TrainingGraph
from gopt.errors import UnsupportedError
from gopt.ir.graph import COMM, Graph, Node
from gopt.records.mesh import AXES, AxisKind, axis_kinds

SAME = ("AllReduce", "Reduce", "Broadcast")
"""Calls whose results are shaped like their operands, one by one."""


DECLARED = "gopt.axes"
"""Metadata key of a source: the user's declarations of axes that its calls name, such as ``zone=data,rep=replica``."""


def declared_axes(graph: Graph) -> dict[str, AxisKind]:
    """Return the declared kinds of the axes that the calls of a source name."""
    return axis_kinds(filter(None, graph.metadata.get(DECLARED, "").split(",")))


def declare_axes(graph: Graph, axes: Mapping[str, AxisKind]) -> None:
    """Declare axes in the graph's metadata, overriding existing entries; call this function before role recovery."""
    declared = {**declared_axes(graph), **axes}
    if declared:
        graph.metadata[DECLARED] = ",".join(f"{name}={kind.value}" for name, kind in sorted(declared.items()))


def data_axes(graph: Graph) -> frozenset[str]:
    """The axes along which calls of a source meet other data; no mesh is known yet."""
    return frozenset(name for name, kind in {**AXES, **declared_axes(graph)}.items() if kind is AxisKind.DATA)


def spans_data_axes(node: Node, data: Collection[str]) -> bool:
    """Return whether a call's group has an axis that sees different data."""
    return any(axis in data for axis in str(node.attributes.get("group", "")).split("+"))


@dataclass(frozen=True, slots=True)
class LookThroughView:
    """``graph`` without collectives; ``origin``: index of the original node, for each node."""

    graph: Graph
    origin: tuple[int, ...]

    def restore(self, training: TrainingGraph, graph: Graph) -> TrainingGraph:
        """The same roles over the graph with collectives."""
        phases: dict[int, set[Phase]] = {}
        for position, stand_in in zip(self.origin, training.graph.nodes):
            assert stand_in.phase is not None
            phases.setdefault(position, set()).add(stand_in.phase)
        for position, node in enumerate(graph.nodes):
            if Phase.UPDATE in phases[position] and len(phases[position]) > 1:
                raise UnsupportedError(
                    f"{node.op_type} {node.label!r} carries values of the update together with others",
                    "split it into two calls",
                )
            node.phase = min(phases[position], key=list(Phase).index)
        return replace(training, graph=graph)


def look_through(graph: Graph) -> LookThroughView | None:
    """The graph with all collectives replaced; None without collectives."""
    if not any(node.domain == COMM for node in graph.nodes):
        return None
    data = data_axes(graph)
    nodes: list[Node] = []
    origin: list[int] = []
    for position, node in enumerate(graph.nodes):
        stand_ins = _stand_ins(node, data) if node.domain == COMM else [node]
        nodes += stand_ins
        origin += [position] * len(stand_ins)
    return LookThroughView(replace(graph, nodes=nodes), tuple(origin))


def _stand_ins(node: Node, data: Collection[str]) -> list[Node]:
    if node.op_type not in SAME or len(node.inputs) != len(node.outputs):
        return [Node("Concat", node.inputs, node.outputs, name=node.name, attributes={})]
    op_type = "Identity" if spans_data_axes(node, data) else "Slice"
    return [Node(op_type, [old], [new], name=node.name, attributes={}) for old, new in zip(node.inputs, node.outputs)]
