"""The losses of a step with some readings of its values held: what a backward makes of them that takes these for
constants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.ir.types import TensorType
from gopt.runtime.reference_eval import seconds
from gopt.verification.gradient_check.forward import CheckedForward, Values
from gopt.verification.reference_graphs import subgraph

PER_NODE = 1e-5
"""Seconds that a node on next to nothing takes."""
EVERY = -1
"""All inputs of a node that are one value."""
_FLAGS = (np.array(False), np.array(True))
_BOUND = 1.0
"""Between what and its negative a gradient passes straight through a sign, where it is bounded."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A node reads a value, its input ``place`` or every one, as a constant. ``through``: or its output moves as that
    value does; ``bounded``: where that is small."""

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
        """Return what the reading is held at, given the values at a point."""
        value = at[self.value]
        if not self.through:
            return {f"{self.key}.held": value}
        gain = np.where(np.abs(value) <= _BOUND, 1.0, 0.0 if self.bounded else 1.0).astype(value.dtype)
        return {f"{self.key}.gain": gain, f"{self.key}.held": at[self.node] - gain * value}


class HeldForward:
    """Computes the losses at points of ``points``: some of the ``stops`` are on there."""

    def __init__(self, forward: CheckedForward, stops: Sequence[Stop]) -> None:
        self.forward, self.stops = forward, stops
        self._graph = subgraph(forward.graph, forward.graph.nodes, forward.training.losses, ())
        self._program = forward.ready(_with_stops(self._graph, stops), forward.training.losses)

    @property
    def seconds(self) -> float:
        """About how long a run takes."""
        estimate = seconds(self._graph, PER_NODE)
        return estimate if np.isfinite(estimate) else PER_NODE * len(self._graph.nodes)

    def points(self, points: Sequence[Values]) -> list[Values]:
        """The points, with what is read there."""
        values = list(dict.fromkeys(name for stop in self.stops for name in (stop.value, stop.node)))
        found = []
        for point in points:
            at = {**point, **self.forward.values([name for name in values if name not in point], point)}
            found.append({**point, **{name: each for stop in self.stops for name, each in stop.fed(at).items()}})
        return found

    def on(self, points: Sequence[Values], stops: Collection[Stop]) -> list[Values]:
        """Points of ``points`` where these are held, and no others."""
        flags = {f"{stop.key}.on": _FLAGS[stop in stops] for stop in self.stops}
        return [{**point, **flags} for point in points]

    def losses(self, point: Values) -> np.ndarray:
        return self.forward.losses_by(self._program, point)


def _with_stops(graph: Graph, stops: Sequence[Stop]) -> Graph:
    """The graph with a choice at each reading: what it is, or what it is held at."""
    by_node: dict[str, list[Stop]] = {}
    for stop in stops:
        by_node.setdefault(stop.node, []).append(stop)
    made = replace(graph, nodes=[], inputs=dict(graph.inputs), types=dict(graph.types))
    for node in graph.nodes:
        own, source = by_node.get(node.first_output, ()), node.inputs
        for stop in own:
            if not stop.through:
                every = [place for place, each in enumerate(source) if each == stop.value]
                places = every if stop.place == EVERY else [stop.place]
                chosen = _choice(made, stop, node.inputs[places[0]], f"{stop.key}.held")
                node.inputs = [chosen if place in places else each for place, each in enumerate(node.inputs)]
        made.nodes.append(node)
        through = [stop for stop in own if stop.through]
        if through:
            output, made_here = node.first_output, f"gopt.own.{node.first_output}"
            made.types[made_here] = made.types[output]
            node.outputs = [made_here, *node.outputs[1:]]
            for stop in through:
                made_here = _choice(made, stop, made_here, _moved(made, stop))
            made.nodes.append(Node("Identity", [made_here], [output]))
    return made


def _moved(graph: Graph, stop: Stop) -> str:
    """Add a value that moves as the one that is read does, from where it is held."""
    gain, part, moved = (f"{stop.key}.{word}" for word in ("gain", "part", "moved"))
    graph.inputs[gain] = graph.types[gain] = graph.types[part] = graph.types[moved] = graph.types[stop.value]
    graph.inputs[f"{stop.key}.held"] = graph.types[f"{stop.key}.held"] = graph.types[stop.value]
    graph.nodes.append(Node("Mul", [stop.value, gain], [part]))
    graph.nodes.append(Node("Add", [part, f"{stop.key}.held"], [moved]))
    return moved


def _choice(graph: Graph, stop: Stop, own: str, held: str) -> str:
    on, chosen = f"{stop.key}.on", f"{stop.key}.chosen"
    graph.inputs[on] = graph.types[on] = TensorType("bool", ())
    graph.types[chosen] = graph.types[own]
    if not stop.through:
        graph.inputs[held] = graph.types[held] = graph.types[own]
    graph.nodes.append(Node("Where", [on, held, own], [chosen]))
    return chosen
