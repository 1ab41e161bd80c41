"""Difference quotients of losses, and a test of proportionality to the quotients predicted by a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gopt.verification.gradient_check.forward import Precision, Values
from gopt.verification.side_by_side import ABREAST, side_by_side

DIRECTIONS = 3
CLEAR = 0.3
"""Maximum share of the tolerance that rounding of a slope may use; a smaller slope is ignored."""
STEADY = 0.1
"""Share of a value's distance from slopes by which slopes of two lengths may differ, to be the derivative."""
NEAR = 0.2
"""Share of a parameter's length by which a new value may differ from the parameter."""
Losses = Callable[[Values], np.ndarray]


@dataclass(frozen=True)
class Candidate:
    """A possible gradient of ``parameter``: ``at`` has the value at every point, ``origin`` the parameter.

    ``name`` is the moved value: the parameter, or a substitute."""

    parameter: str
    name: str
    origin: np.ndarray
    at: tuple[np.ndarray, ...]
    share: float = 1.0
    """Its largest entry over the largest entry of all gradients."""
    inside: np.ndarray | None = None
    """Entries to move: None for all."""
    whole: bool = False
    """Whether entries that are always zero are moved too."""

    @cached_property
    def changes(self) -> list[np.ndarray]:
        """Differences to the first point. Terms independent of the batch fall out."""
        return [array - self.at[0] for array in self.at[1:]]

    @cached_property
    def size(self) -> float:
        return max(float(np.linalg.norm(change)) for change in self.changes)

    @cached_property
    def moved(self) -> np.ndarray:
        """Entries that are not always zero: zero entries may be masked (a padding row) and are inconclusive."""
        moved: np.ndarray = np.logical_or.reduce([array != 0 for array in self.at])
        moved = np.full_like(moved, True) if self.whole and moved.any() else moved
        return moved if self.inside is None else moved & self.inside

    @property
    def is_near(self) -> bool:
        """Whether the value is about the parameter, as a new value of the parameter is."""
        near = NEAR * float(np.linalg.norm(self.origin))
        return all(float(np.linalg.norm(array - self.origin)) < near for array in self.at)


@dataclass(slots=True)
class Slopes:
    """Slopes of the losses along directions, as far as measured: any value is compared with them. ``at``: of each
    length and direction the slopes at all points, and the largest loss."""

    points: Sequence[Values]
    directions: list[list[np.ndarray]]
    at: dict[tuple[float, int], tuple[list[np.ndarray], float]] = field(default_factory=dict)

    def measured(
        self, parts: Sequence[Candidate], losses: Losses, step: float, number: int, abreast: int
    ) -> tuple[list[np.ndarray], float]:
        if (step, number) not in self.at:
            ends = [
                *_moved(self.points, parts, self.directions[number], step),
                *_moved(self.points, parts, self.directions[number], -step),
            ]
            results = side_by_side(losses, ends, abreast)
            count = len(self.points)
            slopes = [(high - low) / (2 * step) for high, low in zip(results[:count], results[count:])]
            self.at[step, number] = slopes, max(float(np.abs(array).max()) for array in results)
        return self.at[step, number]


@dataclass(frozen=True, slots=True)
class QuotientFit:
    """Residual of ⟨g, d⟩ = factor · slope over all directions: ``rest`` is relative to the measured values.

    With several losses the fit is of the first loss alone that fits, else of a sum of slopes, each with a separate
    factor: ``factor`` is of the largest term, and there are no ratios.

    ``measured`` False: no slope stood out from rounding. ``offset`` tells g = p + factor · gradient from a gradient:
    ⟨g − factor · gradient, d⟩ relative to ⟨p, d⟩.
    """

    measured: bool
    holds: bool
    factor: float
    rest: float
    ratios: tuple[float, ...]
    offset: float = 0.0

    @property
    def replaces(self) -> bool:
        """Whether g = p - rate * gradient: the result of a descent in the parameter's place."""
        return self.factor < 0 and 0.5 < self.offset < 1.5


def directions(parts: Sequence[Candidate], count: int, generator: np.random.Generator) -> list[list[np.ndarray]]:
    """Random directions in all ``parts``, enough for ``count`` losses."""
    return [_direction(parts, generator) for _ in range(DIRECTIONS + count - 1)]


def measure(
    parts: Sequence[Candidate], slopes: Slopes, losses: Losses, precision: Precision, rungs: int | None = None,
    abreast: int = ABREAST,
) -> QuotientFit:  # fmt: skip
    """The best fit over the ladder for all ``parts`` moved together, one factor for all, for each loss.

    Each length of the step takes 2 runs of the losses a point and direction. The first agreement ends the search, as do
    equal slopes of another length; at most ``rungs`` measurable lengths are tried. Many parts have to
    agree better: a single wrong part must not hide."""
    due = replace(precision, tolerance=precision.tolerance / math.sqrt(len(parts)))
    best = QuotientFit(False, False, 0.0, 1.0, ())
    too_short, tried, before = 0.0, 0, np.empty((0, 0))
    for step in precision.ladder:
        if step <= too_short or tried == rungs:
            continue
        fit, rise = _fit(parts, slopes, losses, due, step, abreast)
        if fit.holds:
            return fit
        if not fit.measured:
            too_short = max(too_short, step)
            continue
        tried += 1
        if not best.measured or fit.rest < best.rest:
            best = fit
        rows = min(len(rise), len(before))
        change = float(np.linalg.norm(rise[:rows] - before[:rows])) if rows else math.inf
        if rise.shape[1] == 1 and change <= STEADY * fit.rest * float(np.linalg.norm(rise[:rows])):
            break
        before = rise
    return best


def _direction(parts: Sequence[Candidate], generator: np.random.Generator) -> list[np.ndarray]:
    """A random direction of length one, with about the same share of the slope for every part."""
    typical = float(np.median([part.size for part in parts]))
    drawn = []
    for part in parts:
        draw = generator.standard_normal(part.origin.shape) * part.moved
        drawn.append(draw * np.clip(typical / max(part.size, 1e-300), 1e-3, 1e3))
    length = float(np.sqrt(sum(float(np.vdot(array, array)) for array in drawn)))
    return [array / max(length, 1e-300) for array in drawn]


def _fit(
    parts: Sequence[Candidate], slopes: Slopes, losses: Losses, precision: Precision, step: float, abreast: int
) -> tuple[QuotientFit, np.ndarray]:
    """The fit at a length, and the changes of slopes: of the first directions only, where these exclude the value."""
    along = np.array([
        [sum(float(np.vdot(p.changes[index], d)) for p, d in zip(parts, direction))
         for index in range(len(slopes.points) - 1)]
        for direction in slopes.directions
    ])  # fmt: skip
    most = 2 * precision.tolerance * float(np.linalg.norm(along))
    rise, level, offsets, whole = [], 0.0, [], []
    for number, direction in enumerate(slopes.directions):
        by_point, reached = slopes.measured(parts, losses, step, number, abreast)
        level = max(level, reached)
        rise += [slope - by_point[0] for slope in by_point[1:]]
        offsets.append((sum(float(np.vdot(p.at[0], d)) for p, d in zip(parts, direction)), by_point[0]))
        whole.append(sum(float(np.vdot(p.origin, d)) for p, d in zip(parts, direction)))
        measured, predicted = np.array(rise), along[: number + 1].ravel()
        fit = _judged(predicted, measured, precision, precision.rounding * level / step, offsets, whole)
        if fit.measured and not fit.holds and _distance(predicted, measured) > most:
            break
    return fit, measured


def _distance(along: np.ndarray, rise: np.ndarray) -> float:
    """The distance of a value from any multiples of the slopes of all losses: more directions only add to the
    distance."""
    if not np.isfinite(rise).all():
        return 0.0
    return float(np.linalg.norm(along - rise @ np.linalg.lstsq(rise, along, rcond=None)[0]))


def _moved(
    points: Sequence[Values], parts: Sequence[Candidate], direction: Sequence[np.ndarray], step: float
) -> Iterator[Values]:
    """The points, moved. Points with a shared moved array share the result: it is bound once."""
    copies: dict[tuple[int, int], np.ndarray] = {}
    for point in points:
        moved = dict(point)
        for number, (part, along) in enumerate(zip(parts, direction)):
            before = moved[part.name]  # two parts may move one value
            key = number, id(before)
            if key not in copies:
                copies[key] = (before + step * along).astype(before.dtype)
            moved[part.name] = copies[key]
        yield moved


def _judged(
    along: np.ndarray, rise: np.ndarray, precision: Precision, noise: float,
    offsets: Sequence[tuple[float, np.ndarray]], whole: Sequence[float],
) -> QuotientFit:  # fmt: skip
    """The first holding fit to one loss alone; else the fit to all together. ``rise``: a column for each loss."""

    def fitted(chosen: list[int]) -> QuotientFit:
        beside = [(value, slopes[chosen]) for value, slopes in offsets]
        return _fitted(along, rise[:, chosen], precision, noise, beside, np.array(whole))

    fits = [fitted([column]) for column in range(rise.shape[1])]
    heard = [column for column, fit in enumerate(fits) if fit.measured]  # rounding would fit to anything
    if len(heard) > 1:
        fits.append(fitted(heard))
    first_fit = next((fit for fit in fits if fit.holds), None)
    return first_fit or min(fits, key=lambda fit: (not fit.measured, fit.rest))


def _fitted(
    along: np.ndarray, rise: np.ndarray, precision: Precision, noise: float,
    offsets: Sequence[tuple[float, np.ndarray]], whole: np.ndarray,
) -> QuotientFit:  # fmt: skip
    length, steep = float(np.linalg.norm(along)), float(np.linalg.norm(rise))
    if not np.isfinite(length + steep) or steep * CLEAR * precision.tolerance < noise:
        return QuotientFit(False, False, 0.0, 1.0, ())
    factors = np.linalg.lstsq(rise, along, rcond=None)[0]
    factor = float(factors[np.argmax(np.abs(factors) * np.linalg.norm(rise, axis=0))])
    rest = float(np.linalg.norm(along - rise @ factors))
    single = zip(along, rise[:, 0]) if len(factors) == 1 else ()
    ratios = tuple(round(float(a / s), 6) for a, s in single if abs(s) > noise)
    holds = factor != 0 and rest <= precision.tolerance * length + float(np.abs(factors).sum()) * noise
    beside = np.array([value - float(slopes @ factors) for value, slopes in offsets])
    offset = float(np.dot(beside, whole) / max(float(np.dot(whole, whole)), 1e-300))
    clean = float(np.linalg.norm(beside - offset * whole)) <= 1e-2 * float(np.linalg.norm(beside))
    return QuotientFit(True, bool(holds), factor, rest / max(length, 1e-300), ratios, offset if clean else 0.0)
