"""The losses of a step with some readings of values held: the view of a backward that takes these for constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.verification.gradient_check.forward import CheckedForward, Values
from gopt.verification.reference_graphs import subgraph

EVERY = -1
"""All inputs of a node that are one value."""
_FLAGS = (np.array(False), np.array(True))
_BOUND = 1.0
"""Between what and its negative a gradient passes straight through a sign, where it is bounded."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A node reads a value, at input ``place`` or at every input, as a constant. ``through``: or the output moves as
    the value does; ``bounded``: where the value is small."""

    node: str
    """Its first output."""
    place: int
    value: str
    through: bool = False
    bounded: bool = False

    def __str__(self) -> str:
        return f"{self.value!r}, {'passed straight through' if self.through else 'read'} by the node of {self.node!r}"

    @property
    def key(self) -> str:
        return f"gopt.stop.{self.node}.{self.place}.{self.through:d}{self.bounded:d}"

    def fed(self, at: Mapping[str, np.ndarray]) -> Values:
        """Return the held values of the reading, given the values at a point."""
        value = at[self.value]
        if not self.through:
            return {f"{self.key}.held": value}
        gain = np.where(np.abs(value) <= _BOUND, 1.0, 0.0 if self.bounded else 1.0).astype(value.dtype)
        return {f"{self.key}.gain": gain, f"{self.key}.held": at[self.node] - gain * value}


class HeldForward:
    """Computes the losses at points of ``points``: some of the ``stops`` are on there."""

    def __init__(self, forward: CheckedForward, stops: Sequence[Stop]) -> None:
        self.forward, self.stops = forward, stops
        graph = subgraph(forward.graph, forward.graph.nodes, forward.training.losses, ()).twin()
        self._program = forward.ready(_with_stops(graph, stops), forward.training.losses)

    def points(self, points: Sequence[Values]) -> list[Values]:
        """The points, with the readings there."""
        values = list(dict.fromkeys(name for stop in self.stops for name in (stop.value, stop.node)))
        extended = []
        for point in points:
            at = {**point, **self.forward.values([name for name in values if name not in point], point)}
            extended.append({**point, **{name: array for stop in self.stops for name, array in stop.fed(at).items()}})
        return extended

    def on(self, points: Sequence[Values], stops: Collection[Stop]) -> list[Values]:
        """Points of ``points`` with these readings held, and no others."""
        flags = {f"{stop.key}.on": _FLAGS[stop in stops] for stop in self.stops}
        return [{**point, **flags} for point in points]

    def losses(self, point: Values) -> np.ndarray:
        return self.forward.losses_by(self._program, point)


def _with_stops(graph: Graph, stops: Sequence[Stop]) -> Graph:
    """The graph with a choice at each reading: the value, or the held value."""
    by_node: dict[str, list[Stop]] = {}
    for stop in stops:
        by_node.setdefault(stop.node, []).append(stop)
    result = replace(graph, nodes=[], inputs=dict(graph.inputs), types=dict(graph.types))
    for node in graph.nodes:
        stops_of, source = by_node.get(node.first_output, ()), node.inputs
        for stop in stops_of:
            if not stop.through:
                every = [index for index, name in enumerate(source) if name == stop.value]
                indices = every if stop.place == EVERY else [stop.place]
                chosen = _choice(result, stop, node.inputs[indices[0]], f"{stop.key}.held")
                node.inputs = [chosen if index in indices else name for index, name in enumerate(node.inputs)]
        result.nodes.append(node)
        through = [stop for stop in stops_of if stop.through]
        if through:
            output, made_here = node.first_output, f"gopt.own.{node.first_output}"
            result.types[made_here] = result.types[output]
            node.outputs = [made_here, *node.outputs[1:]]
            for stop in through:
                made_here = _choice(result, stop, made_here, _moved(result, stop))
            result.nodes.append(Node("Identity", [made_here], [output]))
    return result


def _moved(graph: Graph, stop: Stop) -> str:
    """Add a value that moves as the read value does, from the held value."""
    gain, part, moved = (f"{stop.key}.{word}" for word in ("gain", "part", "moved"))
    graph.inputs[gain] = graph.types[gain] = graph.types[part] = graph.types[moved] = graph.types[stop.value]
    graph.inputs[f"{stop.key}.held"] = graph.types[f"{stop.key}.held"] = graph.types[stop.value]
    graph.nodes.append(Node("Mul", [stop.value, gain], [part]))
    graph.nodes.append(Node("Add", [part, f"{stop.key}.held"], [moved]))
    return moved


def _choice(graph: Graph, stop: Stop, value: str, constant: str) -> str:
    on, chosen = f"{stop.key}.on", f"{stop.key}.chosen"
    graph.inputs[on] = graph.types[on] = TensorType("bool", ())
    graph.types[chosen] = graph.types[value]
    if not stop.through:
        graph.inputs[constant] = graph.types[constant] = graph.types[value]
    graph.nodes.append(Node("Where", [on, constant, value], [chosen]))
    return chosen
