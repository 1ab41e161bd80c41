"""The source up to the gradients, as a function of a point: in the finest precision that runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.errors import RunError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.types import LOW_PRECISION
from gopt.runtime.bound_calls import CollectiveCallback
from gopt.runtime.executor import HeldInput
from gopt.runtime.float64 import Float64Graph
from gopt.runtime.memory import give_back
from gopt.runtime.reference_eval import seconds
from gopt.runtime.session import SessionCache
from gopt.runtime.widen import NARROW, widened
from gopt.verification.gradient_check.large_weights import along, length, with_large_weights
from gopt.verification.reference_graphs import local_graph, subgraph
from gopt.verification.side_by_side import ABREAST
from gopt.verification.source_members import run_source

Values = dict[str, np.ndarray]
"""A point: states, hyper-parameters and a batch by name; or what was computed there."""
HALF_TOLERANCE = 2e-2
"""Tolerance for a source with half-precision constants: 1/12 in float16 is off by 2e-4, in bfloat16 by 2e-3."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Accuracy of a difference quotient.

    ``ladder``: lengths of the step, tried in turn; ``rounding``: relative, of a loss value; ``tolerance``: of a
    quotient, relative; ``changes``: changes of the loss in roundings, for choosing steps instead."""

    dtype: str
    ladder: tuple[float, ...]
    rounding: float
    tolerance: float
    changes: tuple[float, ...]


DOUBLE = Precision(
    "float64", (1e-4, 1e-5, 1e-6, 1e-7, 1e-3, 1e-2, 1e-1), 16 * 2.0**-53, 1e-4, (1e6, 1e5, 1e7, 1e4, 1e8)
)
SINGLE = Precision("float32", (1e-2, 3e-3, 1e-3, 3e-4), 8 * 2.0**-24, 8e-2, (1e3, 3e3, 3e2, 1e4))


PER_NODE = 1e-5
"""Seconds that a node on next to nothing takes."""
_LARGE = 1 << 28
"""Bytes of stored values above which sessions keep no memory between runs."""
_BESIDE = 1 << 30
"""Bytes of the parameters in float64 up to which runs stand side by side."""
_SMALL = 1 << 20
"""Bytes up to which a value is kept bound: large ones cost memory, and no more to bind."""


@dataclass(slots=True)
class PointProgram:
    """A program that keeps its last inputs: points mostly share all but a batch and the moved values."""

    program: Float64Graph
    bound: dict[str, tuple[np.ndarray, HeldInput]] = field(default_factory=dict)

    def run(self, point: Values, call: CollectiveCallback) -> Values:
        """Run on the values read by the program."""
        feeds: dict[str, HeldInput] = {}
        for name in self.program.graph.inputs.keys() & point.keys():
            value, held_input = point[name], self.bound.get(name)
            if held_input is None or held_input[0] is not value:
                wide = value.astype(np.float64) if self._narrow(name, value) else value
                held_input = value, self.program.hold({name: wide})[name]
                if value.nbytes <= _SMALL:
                    self.bound[name] = held_input
            feeds[name] = held_input[1]
        return run_source(self.program, feeds, call)

    def _narrow(self, name: str, value: np.ndarray) -> bool:
        return value.dtype == np.float32 and self.program.graph.inputs[name].dtype == "float64"


def sessions_for(graph: Graph) -> SessionCache:
    """Sessions that keep the memory of a run for the next, unless large."""
    return SessionCache(keep=sum(initializer.nbytes for initializer in graph.initializers.values()) <= _LARGE)


class CheckedForward:
    """Computes the losses, alone or with all gradients, at any point. ``runs`` counts the runs."""

    def __init__(self, training: TrainingGraph, call: CollectiveCallback, sparing: bool = False) -> None:
        """``sparing``: keep large weights and their gradients in float32."""
        self.training = training
        self.runs = 0
        self._sparing = sparing
        self.large: frozenset[str] = frozenset()
        """Weights that stay float32: ``moved`` moves them."""
        self._call, self._cache = call, sessions_for(training.graph)
        self.gradients = list(dict.fromkeys(training.gradients.values()))
        self._losses: dict[tuple[str, ...], PointProgram] = {}
        self._graph, self.precision, self._all = self._finest()
        widened = sum(training.graph.types[name].elements for name in training.gradients) * 8
        self.abreast = 1 if self.large or widened > _BESIDE else ABREAST
        """Runs at a time: each has parameters, or gradients, of its own."""

    @property
    def graph(self) -> Graph:
        """The whole widened graph."""
        return self._graph

    @cached_property
    def seconds(self) -> float:
        """About how long a run of the losses takes."""
        graph = subgraph(self._graph, self._graph.nodes, self.training.losses, ())
        estimate = seconds(graph, PER_NODE)
        return estimate if np.isfinite(estimate) else PER_NODE * len(graph.nodes)

    def points(self, mappings: Sequence[Mapping[str, np.ndarray]], narrow: Collection[str] = ()) -> list[Values]:
        """Return each mapping restricted to the inputs of the graph, widened; shared arrays are widened once.

        ``narrow``: names of float32 values widened only when read."""
        types, dtype = self.training.graph.types, self.precision.dtype
        widened: dict[int, np.ndarray] = {}

        def wide(name: str, value: np.ndarray) -> np.ndarray:
            if id(value) not in widened:  # alive until the end: ``mappings`` holds it
                widen = types[name].dtype in NARROW and not (name in narrow and types[name].dtype == "float32")
                widened[id(value)] = np.asarray(value, dtype) if widen else np.asarray(value)
            return widened[id(value)]

        return [{n: wide(n, value) for n, value in mapping.items() if n in self._graph.inputs} for mapping in mappings]

    def loss_and_gradients(self, point: Values) -> tuple[np.ndarray, Values]:
        """All losses, and the gradients by name, in float64."""
        self.runs += 1
        results, stay = self._all.run(self._still(point), self._call), {self.training.gradients[n] for n in self.large}
        wide = {
            name: results[name] if name in stay else np.asarray(results[name], np.float64) for name in self.gradients
        }
        return self._stacked(results), wide

    def losses(self, point: Values, fixed: Sequence[str] = ()) -> np.ndarray:
        """All losses; values named in ``fixed`` are taken from the point instead of being computed."""
        key = tuple(fixed)
        if key not in self._losses:
            self._losses[key] = self.ready(self._graph, self.training.losses, key)
        self.runs += 1
        return self._stacked(self._losses[key].run(self._still(point), self._call))

    def _still(self, point: Values) -> Values:
        """The point; large weights that are not moved get a move of zero."""
        unmoved = [name for name in self.large if along(name) not in point]
        return {**point, **{along(n): point[n] for n in unmoved}, **{length(n): np.zeros(()) for n in unmoved}}

    def moved(self, point: Values, direction: Mapping[str, np.ndarray], step: float) -> Values:
        """The point with values moved along a direction."""
        moved = dict(point)
        if self.large:
            give_back()  # the gradients behind the directions
        for name, way in direction.items():
            if name in self.large:
                moved |= {along(name): way, length(name): np.array(step)}
            else:
                moved[name] = np.multiply(way, step, dtype=self.precision.dtype)
                moved[name] += point[name]
        return moved

    def loss(self, point: Values, index: int = 0) -> float:
        """The first loss, or another by index."""
        return float(self.losses(point)[index])

    def _stacked(self, results: Values) -> np.ndarray:
        return np.array([float(np.asarray(results[name], np.float64).reshape(())) for name in self.training.losses])

    def values(self, names: Sequence[str], point: Values, fixed: Sequence[str] = ()) -> Values:
        """Other values of the graph, with those in ``fixed`` taken from the point."""
        self.runs += 1
        return self.ready(self._graph, names, fixed).run(point, self._call)

    def leaves_numbers(self, point: Values) -> str:
        """The first node of the losses with a result that is no number at a point, or ''."""
        nodes = subgraph(self._graph, self._graph.nodes, self.training.losses, ()).nodes
        values = self.values([name for node in nodes for name in node.outputs if name], point)
        for node in nodes:
            for name in filter(None, node.outputs):
                value = np.asarray(values[name])
                if value.dtype.kind == "f" and not np.isfinite(value).all():
                    return f"{node.op_type} {node.label!r}"
        return ""

    def reads(self, name: str, fixed: Sequence[str]) -> set[str]:
        """The inputs behind a value by ways other than through ``fixed``."""
        return subgraph(self._graph, self._graph.nodes, [name], fixed).inputs.keys() - set(fixed)

    def losses_by(self, program: PointProgram, point: Values) -> np.ndarray:
        """All losses as computed by another program."""
        self.runs += 1
        return self._stacked(program.run(point, self._call))

    def ready(self, graph: Graph, outputs: Iterable[str], fixed: Sequence[str] = ()) -> PointProgram:
        return PointProgram(Float64Graph(subgraph(graph, graph.nodes, dict.fromkeys(outputs), fixed), self._cache))

    def _finest(self) -> tuple[Graph, Precision, PointProgram]:
        graph, states = local_graph(self.training), {state.tensor for state in self.training.states}
        # Points have all states.
        graph = replace(graph, initializers={n: tensor for n, tensor in graph.initializers.items() if n not in states})
        half = any(type.dtype in LOW_PRECISION for type in graph.types.values())
        for precision in (DOUBLE, SINGLE):
            wide = widened(graph, precision.dtype)
            try:
                program = self.ready(wide, [*self.training.losses, *self.gradients])
            except (UnsupportedError, RunError):
                if precision is SINGLE:
                    raise
            else:
                if self._sparing and precision is DOUBLE and not half:
                    wide, self.large = with_large_weights(wide, graph, self.training.gradients, self.training.losses)
                    program = self.ready(wide, [*self.training.losses, *self.gradients]) if self.large else program
                tolerance = max(precision.tolerance, HALF_TOLERANCE) if half else precision.tolerance
                return wide, replace(precision, tolerance=tolerance), program
        raise AssertionError("one of the two returns or raises")
