"""Whether a source with calls lacking a dual in the data flow computes gradients nevertheless.

Members of the source run side by side on equal values. For a right gradient, the mean over members of ⟨g, d⟩ is
proportional to the change of the mean loss along d, moved on all members alike: of a parameter shared by all members
the change itself, of a split parameter a share. No dual is needed where nothing flows back. A slice of one fixed
member, a missing sum beside a term that needs none, a dual of other sizes or axes agree with no factor. A measurement
may refuse a source; an impossible measurement only leaves a note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from gopt.analysis.region_mappings import RegionMapping, find_region_mappings, without_dual
from gopt.analysis.training import TrainingGraph
from gopt.errors import InputError, RunError, UnsupportedError
from gopt.ir.graph import Graph
from gopt.ir.types import LOW_PRECISION
from gopt.records.mesh import Mesh
from gopt.runtime.float64 import Float64Graph
from gopt.runtime.session import SessionCache
from gopt.runtime.widen import NARROW, widened
from gopt.verification import sampling
from gopt.verification.reference_graphs import local_graph, subgraph
from gopt.verification.source_members import MOST, Values, member_mesh, run_members

NEAR, MANY, CONTROL = 2, 8, 3
"""Parameters that are measured: of those above a mapping without a dual, above an all-reduce, and of all others."""
DIRECTIONS = 3
STEPS = (1e-4, 3e-5)
"""Lengths of a move in float64, relative to the parameter's size: slopes that differ between them are no verdict."""
STEADY, WRONG, WRONG_IN_HALVES = 1e-4, 2e-3, 5e-2
"""How far slopes may differ between steps, and how far a gradient must be off, relative; where the source has halves,
its constants are rounded."""
ELEMENTS = 1 << 24
"""Elements of states and activations of all members, above which nothing is run here."""


def check_source_duals(training: TrainingGraph, mesh: Mesh, seed: int = 0) -> list[str]:
    """Refuse a source with a lost dual of a mapping; returns notes on open questions.

    Nothing is run if data flow pairs every mapping with its dual. Raises UnsupportedError, by name."""
    suspects = without_dual(find_region_mappings(training))
    live = [suspect for suspect in suspects if suspect.parameters and mesh.live(suspect.group)]
    if not live:
        return []
    open_note = [f"{_named(suspect)}: its dual was not found, and could not be measured" for suspect in live]
    members = member_mesh(mesh, training.graph.nodes)
    if (
        members is None
        or members.ranks > MOST
        or training.random
        or len(training.losses) > 1
        or _size(training.graph) * members.ranks > ELEMENTS
    ):
        return open_note
    try:
        measured = _Measured(training, members, seed)
    except (InputError, RunError, UnsupportedError):  # no kernel in float64, or values that no draw makes valid
        return open_note
    return [note for note in (_judge(training, suspect, live, measured, members) for suspect in live) if note]


def _judge(
    training: TrainingGraph, mapping: RegionMapping, suspects: Sequence[RegionMapping], measured: _Measured,
    members: Mesh,
) -> str:  # fmt: skip
    """A note if the loss of a mapping's dual is unknown, '' for a present dual.

    A lost dual spoils the gradients of all parameters above the mapping (of some, for a missing sum: the region's own
    are right), and of no other. Where members differ in more than states (each has a range of a vocabulary), gradients
    follow no loss of equal members. There a mapping has lost its dual if the backward has no call for the mapping,
    others of the same form have theirs, and the loss depends on its result. Raises UnsupportedError where the dual was
    lost."""
    above = [name for name in training.gradients if name in mapping.parameters]
    beyond = {name for suspect in suspects for name in suspect.parameters}
    control = [name for name in training.gradients if name not in beyond][:CONTROL]
    summed = mapping.call == "AllReduce"
    chosen = above[:: -(-len(above) // MANY)] if summed else _nearest(above, suspects, mapping)
    verdicts = {name: measured.fits(name) for name in chosen}
    wrong = [name for name, fits in verdicts.items() if fits is False]
    if not wrong:
        return "" if all(verdicts.values()) else f"{_named(mapping)}: its dual was not found, and could not be measured"
    spoilt = any(verdicts.values()) if summed else not any(verdicts.values())
    spoilt = spoilt and not any(measured.fits(name) is False for name in control)
    decides = not spoilt and not mapping.dual and _has_like(training, mapping) and measured.matters(mapping.value)
    if not spoilt and not decides:
        return (
            f"{_named(mapping)}: its dual was not found, and gradients (of {wrong[0]!r}, for one) follow no loss of "
            "equal members: it cannot be told whether it was lost"
        )
    lost = "what its region reads is not summed in the backward" if summed else "its dual was lost"
    raise UnsupportedError(
        f"{_named(mapping)}: {lost}; the gradient {training.gradients[wrong[0]]!r} of {wrong[0]!r} does not follow the "
        f"loss of {members.ranks} members side by side",
        f"export the step with {_due(mapping)}",
    )


def _has_like(training: TrainingGraph, mapping: RegionMapping) -> bool:
    """Return whether another mapping of the same form has its dual."""
    producers = {name: node for node in training.calls for name in node.outputs}

    def form(region: RegionMapping) -> tuple[object, ...]:
        node = producers[region.value]
        return node.op_type, training.graph.type_of(node.inputs[0]).shape, sorted(node.attributes.items())

    if mapping.call in ("", "AllReduce"):
        return False
    twins = [region for region in find_region_mappings(training) if region.call == mapping.call and region.gradient]
    return any(form(region) == form(mapping) and not region.doubtful for region in twins)


def _nearest(above: Sequence[str], suspects: Sequence[RegionMapping], mapping: RegionMapping) -> list[str]:
    """Of the parameters above a mapping those above no earlier mapping, if any."""
    earlier = {
        name for suspect in suspects if set(suspect.parameters) < set(mapping.parameters) for name in suspect.parameters
    }
    names = [name for name in above if name not in earlier] or list(above)
    return names[-NEAR:]


def _named(mapping: RegionMapping) -> str:
    what = f"{mapping.call} {mapping.label!r}" if mapping.call else f"the copy {mapping.value!r}"
    return f"{what} over {mapping.group} ({mapping.mapping})"


def _due(mapping: RegionMapping) -> str:
    return {
        "AllGather": "a ReduceScatter of the same axis and sizes",
        "ReduceScatter": "an AllGather of the same axis and sizes",
        "AllToAll": "an AllToAll with the axes exchanged", "": "an AllReduce of the gradient",
    }.get(mapping.call, "an AllReduce where the region begins")  # fmt: skip


def _size(graph: Graph) -> int:
    return sum(type.elements or 0 for type in graph.types.values() if type.static)


@dataclass(frozen=True, slots=True)
class _Slope:
    value: float
    steady: bool


class _Measured:
    """Losses and gradients of members side by side, at two batches and the source's own or drawn states."""

    def __init__(self, training: TrainingGraph, members: Mesh, seed: int) -> None:
        self.training, self.members = training, members
        self.generator = np.random.default_rng(seed + 11)
        half = any(type.dtype in LOW_PRECISION for type in training.graph.types.values())
        self._tolerance = WRONG_IN_HALVES if half else WRONG
        graph = widened(local_graph(training), "float64")
        self._graph, self._cache = graph, (cache := SessionCache())
        self._all = Float64Graph(graph, cache)
        self._loss = Float64Graph(subgraph(graph, graph.nodes, [training.loss], ()), cache)
        states = {s.tensor: sampling.initial_state(training, s, self.generator) for s in training.states}
        states |= {name: sampling.hyper(training, name) for name in training.hyper}
        ranges = sampling.without_ignored(sampling.integer_ranges(training))
        batches = [sampling.draw_inputs(training, training.batch, self.generator, ranges) for _ in range(2)]
        self.points = [self._wide({**states, **batch}, graph) for batch in batches]
        self._shake()
        self.gradients = [self._mean_gradients(point) for point in self.points]
        self._known: dict[str, bool | None] = {}

    def fits(self, name: str) -> bool | None:
        """Test whether a gradient is proportional to the change of the loss; None if not measurable."""
        if name not in self._known:
            self._known[name] = self._fits(name)
        return self._known[name]

    def matters(self, value: str) -> bool:
        """Return whether the loss depends on a value of the forward; if not, no gradient flows back through the
        value."""
        reader = Float64Graph(subgraph(self._graph, self._graph.nodes, [value], ()), self._cache)
        behind = Float64Graph(subgraph(self._graph, self._graph.nodes, [self.training.loss], [value]), self._cache)
        for point in self.points:
            values = [member[value] for member in self._run(reader, point)]
            size = 1e-3 * max(float(np.max(np.abs(array))) for array in values) or 1e-3
            moved = [array + size * self.generator.standard_normal(array.shape) for array in values]
            before, after = (
                self._losses(behind, [{**point, value: array} for array in points]) for points in (values, moved)
            )
            if not np.allclose(before, after, rtol=1e-9, atol=0):
                return True
        return False

    def _losses(self, program: Float64Graph, points: Sequence[Values]) -> list[float]:
        members = run_members(program, points, self.members)
        return [float(np.asarray(member[self.training.loss]).reshape(())) for member in members]

    def _fits(self, name: str) -> bool | None:
        gradient_a, gradient_b = (gradients[self.training.gradients[name]] for gradients in self.gradients)
        origin = self.points[0].get(name)
        if origin is None or gradient_a.size != origin.size or not np.isfinite(gradient_a - gradient_b).all():
            return None
        change = (gradient_b - gradient_a).reshape(origin.shape)
        drawn = [self.generator.standard_normal(origin.shape) for _ in range(DIRECTIONS)]
        if np.any(change):  # along the gradient itself the slope is largest
            drawn[0] = change
        directions = [array / np.linalg.norm(array) for array in drawn]
        slopes = [self._slope(name, direction) for direction in directions]
        rise = np.array([slope.value for slope in slopes])
        if not all(slope.steady for slope in slopes) or not np.linalg.norm(rise) or not np.any(change):
            return None
        shapes = [change] + [
            change.transpose(order) for order in permutations(range(change.ndim))
            if 1 < change.ndim <= 3 and change.transpose(order).shape == change.shape
        ]  # fmt: skip
        return any(
            _rest(np.array([float(np.vdot(shape, d)) for d in directions]), rise) < self._tolerance for shape in shapes
        )

    def _slope(self, name: str, direction: np.ndarray) -> _Slope:
        """The change of the loss along a direction, between the batches."""
        size = max(float(np.linalg.norm(self.points[0][name])), 1e-3)
        slopes = []
        for step in STEPS:
            ends = [
                sign * self._mean_loss({**point, name: point[name] + sign * step * size * direction}) * weight
                for point, weight in zip(self.points, (-1, 1))
                for sign in (1, -1)
            ]
            slopes.append(sum(ends) / (2 * step * size))
        noise = 1e-15 * max(map(abs, ends)) / (STEPS[-1] * size)
        steady = abs(slopes[0] - slopes[1]) <= STEADY * abs(slopes[0]) + 10 * noise
        return _Slope(slopes[1], bool(steady and np.isfinite(slopes[1])))

    def _shake(self) -> None:
        """Move parameters a little: at zeros and ties a loss has no derivative, or hides errors."""
        for state in self.training.parameters:
            value = self.points[0].get(state.tensor)
            if value is not None and value.dtype.kind == "f":
                usual = float(np.sqrt(np.mean(np.square(value)))) if value.size else 0.0
                noise = 0.1 * (usual or 1.0) * self.generator.standard_normal(value.shape)
                for point in self.points:
                    point[state.tensor] = value + noise

    def _wide(self, values: Values, graph: Graph) -> Values:
        types = self.training.graph.types
        return {
            name: np.asarray(value, np.float64 if types[name].dtype in NARROW else value.dtype)
            for name, value in values.items()
            if name in graph.inputs
        }

    def _run(self, program: Float64Graph, point: Values) -> list[Values]:
        return run_members(program, [point] * self.members.ranks, self.members)

    def _mean_loss(self, point: Values) -> float:
        name = self.training.loss
        return float(
            np.mean([np.asarray(member[name], np.float64).reshape(()) for member in self._run(self._loss, point)])
        )

    def _mean_gradients(self, point: Values) -> Values:
        results = self._run(self._all, point)
        names = dict.fromkeys(self.training.gradients.values())
        return {name: np.mean([np.asarray(member[name], np.float64) for member in results], axis=0) for name in names}


def _rest(along: np.ndarray, rise: np.ndarray) -> float:
    """Return the relative residual after the best factor."""
    length = float(np.linalg.norm(along))
    if not length:
        return 1.0
    return float(np.linalg.norm(along - rise * (along @ rise) / (rise @ rise))) / length
