"""Explains values that are not the whole derivative: the backward takes some values of the forward for constants.

Batch renorm does so with the ratio of two statistics, many a target network with the compared value, a quantiser with
the error of rounding. Such a value is the derivative of the loss with these readings held. The readings are found by
their parts of the loss's slopes, up to three at a time; the proportionality of the value to the remaining slopes is
then measured as for any gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, nsmallest
from itertools import chain, combinations

import numpy as np

from gopt.ir.graph import Graph, Node
from gopt.ir.types import FLOATS
from gopt.operators.kinds import CASTS, STEPWISE
from gopt.verification.gradient_check.computed_weights import reached, read_by
from gopt.verification.gradient_check.difference_quotients import Candidate, QuotientFit, Slopes, directions, measure
from gopt.verification.gradient_check.forward import CheckedForward, Values
from gopt.verification.gradient_check.held_forward import EVERY, HeldForward, Stop

MOST = 12
"""Readings that are held, at most."""
LIMIT = 160
"""Readings that are tried, those nearest to the parameter."""
DIRECTIONS = 2
RUNGS = 4
"""Lengths of the step that are tried for what was found."""
LOOKS = 400
"""Sets of readings that may be held."""
BEST = 2
"""Sets of each size that may be looked at next."""
EFFORT = 20.0
"""Seconds of all runs, as estimated."""
FEW = 30
"""Readings up to which three at a time are tried, and all pairs are measured."""
_STEPS = STEPWISE | {"Clip"}
"""Functions that backwards pass straight through."""
_QUANTIZES, _DEQUANTIZES = CASTS | {"QuantizeLinear"}, CASTS | {"DequantizeLinear"}
"""Into whole numbers, and back."""


@dataclass
class StopFinder:
    """Finds the readings that values take for constants. ``known``: sets of other values, tried first."""

    forward: CheckedForward
    generator: np.random.Generator
    known: list[tuple[Stop, ...]] = field(default_factory=list)
    searched: set[str] = field(default_factory=set)
    """Parameters for which all readings were tried."""
    left: float = EFFORT
    """The rest of the effort, for searches that find nothing. Each search may take half: a wrong search leaves enough
    to see that others are right. A search need not look for the finds of the search before."""

    def known_forwards(self) -> Iterator[tuple[tuple[Stop, ...], HeldForward]]:
        """The known sets, the latest first, each with the losses under these held readings."""
        for stops in reversed(self.known):
            yield stops, HeldForward(self.forward, stops)

    def explain(self, part: Candidate, points: Sequence[Values]) -> tuple[list[Stop], QuotientFit] | None:
        """The readings that a value takes for constants, and the fit to slopes with these held, or None."""
        near = self._on_the_way(part.name)
        fit = self._fit(part, points, near) if near else None
        if fit is not None and fit.holds:
            return near, fit
        if part.parameter in self.searched:
            return None
        self.searched.add(part.parameter)
        before = self.left
        for chosen in self._chosen(part, points, before / 2):
            fit = self._fit(part, points, chosen)
            if fit.holds:
                self.known.append(tuple(chosen))
                self.left = before
                return chosen, fit
        return None

    def own_readings(self, name: str) -> Iterator[tuple[Stop, HeldForward]]:
        """Each reading of a parameter itself that may be taken for a constant, with the losses under it."""
        tried = _readings(self.forward.graph, self.forward.training.losses, name)
        for stop in tried:
            if stop.value == name and not stop.through:
                yield stop, HeldForward(self.forward, [stop])

    def _on_the_way(self, name: str) -> list[Stop]:
        way = reached(self.forward.graph, {name}) if self.known else set()
        return [stop for stop in dict.fromkeys(chain.from_iterable(self.known)) if stop.value in way]

    def _chosen(self, part: Candidate, points: Sequence[Values], least: float) -> Iterator[list[Stop]]:
        """Readings with measurably near slopes; beside known readings, or straight through steps. ``least``: the
        seconds to be left over."""
        tried = _readings(self.forward.graph, self.forward.training.losses, part.name)
        cost = self.forward.seconds * 2 * DIRECTIONS * len(points)
        if not tried or (self.left - least) < cost:
            return
        held_forward = HeldForward(self.forward, tried)
        straight = [stop for stop in tried if stop.through and not stop.bounded]
        for pairs in (False, True):
            for start in [[], straight] if straight else [[]]:
                looks = min(LOOKS, int((self.left - least) / cost))
                search = _Search(held_forward, part, points, self.generator, looks)
                chosen = search.found(start, pairs)
                self.left -= cost * (looks - search.looks)
                if chosen:
                    yield chosen

    def _fit(self, part: Candidate, points: Sequence[Values], stops: Sequence[Stop]) -> QuotientFit:
        held_forward, count = HeldForward(self.forward, stops), len(self.forward.training.losses)
        placed = held_forward.on(held_forward.points(points), stops)
        slopes = Slopes(placed, directions([part], count, self.generator))
        return measure([part], slopes, held_forward.losses, self.forward.precision, RUNGS, self.forward.abreast)


class _Search:
    """Looks for the readings without which slopes of the loss agree with a value."""

    def __init__(
        self,
        forward: HeldForward,
        part: Candidate,
        points: Sequence[Values],
        generator: np.random.Generator,
        looks: int,
    ) -> None:
        """``looks``: how many sets of readings may be held."""
        self.held, self.part, self.points, self.looks = forward, part, forward.points(points), looks
        drawn = [generator.standard_normal(part.origin.shape) * part.moved for _ in range(DIRECTIONS)]
        self.directions = [array / max(float(np.linalg.norm(array)), 1e-300) for array in drawn]
        self.step = forward.forward.precision.ladder[1]
        self.step = min(self.step, self._short()) if looks > 0 else self.step
        self.exact = 30 * forward.forward.precision.tolerance
        self.along = np.array(
            [float(np.vdot(change, direction)) for direction in self.directions for change in part.changes]
        )

    def _short(self) -> float:
        """The step with no more roundings in the loss's change than a slope needs: a longer step meets more kinks."""
        still, precision = 0 * self.directions[0], self.held.forward.precision
        level = max(abs(self._loss(point, still)) for point in self.held.on(self.points, ()))
        steep = self._slopes([])
        usual = float(np.linalg.norm(steep)) / math.sqrt(steep.size)
        step = precision.changes[0] * precision.rounding * level / (usual or math.nan)
        return step if 0 < step < math.inf else math.inf

    def found(self, start: list[Stop], pairs: bool) -> list[Stop]:
        """The readings to hold, and the readings in ``start``; empty where no further readings end in the value.

        The nearest readings come first; ``pairs``: by the sum of two as well, if few."""
        due: list[tuple[float, int, list[Stop]]] = [(0.0, 0, start)]
        tried: set[frozenset[Stop]] = set()
        while due and self.looks > 0:
            _, _, chosen = heappop(due)
            whole = self._slopes(chosen)
            if self._off(whole) <= self.exact:
                return chosen
            if self.looks < len(self.held.stops):
                continue
            for off, more in self._promising(chosen, whole, pairs):
                if frozenset([*chosen, *more]) not in tried and len(chosen) + len(more) <= MOST:
                    tried.add(frozenset([*chosen, *more]))
                    heappush(due, (off, len(tried), [*chosen, *more]))
        return []

    def _promising(
        self, chosen: list[Stop], whole: np.ndarray, pairs: bool
    ) -> Iterator[tuple[float, tuple[Stop, ...]]]:
        """The nearest readings to the value, for each number of them, and the distance: by the part of each. Among
        equally near readings those next to the loss come first, which explain most other parameters' values too."""
        adds: dict[Stop, np.ndarray] = {}
        passed = {stop.node for stop in chosen if stop.through}
        for stop in reversed(self.held.stops):
            inactive = stop in chosen or (stop.through and stop.node in passed)
            change = 0 * whole if inactive else whole - self._slopes([*chosen, stop])
            if np.isfinite(change).all() and not any(self._alike(change, add) for add in (0 * whole, *adds.values())):
                adds[stop] = change
        interactions: dict[tuple[Stop, Stop], np.ndarray] = {}
        if pairs and len(adds) <= FEW:
            for one, two in combinations(adds, 2):
                interactions[one, two] = adds[one] + adds[two] - (whole - self._slopes([*chosen, one, two]))

        def off(some: tuple[Stop, ...]) -> float:
            twice = sum((interactions[pair] for pair in combinations(some, 2)) if interactions else (), start=0 * whole)
            return self._off(whole - sum((adds[stop] for stop in some), start=0 * whole) + twice)

        for size in range(1, 4 if len(adds) <= FEW else 3):
            ranked = ((off(some), some) for some in combinations(adds, size))
            yield from nsmallest(BEST, ranked, key=lambda entry: max(entry[0], self.exact))

    def _alike(self, one: np.ndarray, target: np.ndarray) -> bool:
        return float(np.linalg.norm(one - target)) <= self.exact * float(np.linalg.norm(self.along))

    def _slopes(self, on: Sequence[Stop]) -> np.ndarray:
        """Of each direction how slopes differ between the first batch and each other; of all losses together."""
        self.looks -= 1
        points, differences = self.held.on(self.points, on), []
        for direction in self.directions:
            move = self.step * direction
            slopes = [(self._loss(point, move) - self._loss(point, -move)) / (2 * self.step) for point in points]
            differences += [slope - slopes[0] for slope in slopes[1:]]
        return np.array(differences)

    def _loss(self, point: Values, move: np.ndarray) -> float:
        before = point[self.part.name]
        return float(self.held.losses({**point, self.part.name: (before + move).astype(before.dtype)}).sum())

    def _off(self, slopes: np.ndarray) -> float:
        """The distance of the value from a multiple of slopes, relative to the value."""
        size = float(np.vdot(slopes, slopes))
        rest = self.along - slopes * (float(np.vdot(slopes, self.along)) / size if size else 0.0)
        distance = float(np.linalg.norm(rest)) / max(float(np.linalg.norm(self.along)), 1e-300)
        return distance if np.isfinite(distance) else np.inf


def _readings(graph: Graph, losses: Sequence[str], name: str) -> list[Stop]:
    """The readings on the way from a parameter to the losses, of values that another node reads there too, or beside
    another operand: a value with a single way on is as held as its result."""
    live, reach = read_by(graph, losses), reached(graph, {name})
    on = [node for node in graph.nodes if not live.isdisjoint(node.outputs) and not reach.isdisjoint(node.inputs)]
    readers: dict[str, int] = {}
    for node in on:
        for operand in dict.fromkeys(node.inputs):
            readers[operand] = readers.get(operand, 0) + 1
    stops: list[Stop] = []
    sources: dict[str, str] = {}
    for node in on:
        operands = [(node.inputs.index(name), name) for name in dict.fromkeys(node.inputs) if name in reach]
        stops += [
            Stop(node.first_output, EVERY if node.inputs.count(name) > 1 else index, name) for index, name in operands
            if (readers[name] > 1 or len(operands) > 1) and graph.type_of(name).dtype in FLOATS
        ]  # fmt: skip
        stops += _through(graph, node, sources)
    return stops[:LIMIT]


def _through(graph: Graph, node: Node, sources: dict[str, str]) -> Iterator[Stop]:
    """A node that a backward may pass straight through; ``sources``: value of another type -> the origin."""
    output, operand = node.first_output, node.inputs[0] if node.inputs else ""
    floating, before = graph.type_of(output).dtype in FLOATS, graph.type_of(operand).dtype in FLOATS
    if node.is_in(_QUANTIZES) and before and not floating:
        sources[output] = operand
    elif node.is_in(_DEQUANTIZES) and floating and operand in sources:
        yield Stop(output, 0, sources[operand], through=True)
    elif node.is_in(_STEPS) and floating:
        yield Stop(output, 0, operand, through=True)
        if node.is_a("Sign"):
            yield Stop(output, 0, operand, through=True, bounded=True)
