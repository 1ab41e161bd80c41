"""Explains values that are not gradients of their parameter: gradients of other values, or of slices."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import numpy as np

from gopt.analysis.training import TrainingGraph
from gopt.verification.gradient_check.computed_weights import TRIES, computed_weights, dependent_values, read_by
from gopt.verification.gradient_check.difference_quotients import Candidate, QuotientFit, Slopes, directions, measure
from gopt.verification.gradient_check.forward import CheckedForward, Values
from gopt.verification.gradient_check.layout import turned, with_layout
from gopt.verification.side_by_side import side_by_side

SLICED = 64
"""Slices along one axis that are measured one by one."""
QUICK = 2
"""Lengths of the step that are tried where many things are."""


@dataclass(frozen=True)
class SlopeMeter:
    """Measures parts of one training step."""

    forward: CheckedForward
    generator: np.random.Generator
    last: dict[Hashable, Slopes] = field(default_factory=dict)
    """The last measured slopes along all of a parameter: further values for the parameter are compared with them."""

    def measure(
        self, parts: Sequence[Candidate], points: Sequence[Values], rungs: int | None = None, fixed: Sequence[str] = ()
    ) -> QuotientFit:
        """``fixed``: graph values taken from the points. Only the first ``rungs`` lengths of the step."""

        def losses(point: Values) -> np.ndarray:
            return self.forward.losses(point, fixed)

        key = tuple(part.name for part in parts), tuple(fixed), tuple(map(id, points))
        slopes = self.last.get(key) if all(part.moved.all() for part in parts) else None
        if slopes is None:
            drawn = directions(parts, len(self.forward.training.losses), self.generator)
            slopes = Slopes(points, drawn)
            self.last.clear()
            if len(parts) == 1 and parts[0].moved.all():
                self.last[key] = slopes
        return measure(parts, slopes, losses, self.forward.precision, rungs, self.forward.abreast)


def along_computed_weight(
    slope_meter: SlopeMeter, training: TrainingGraph, name: str, points: Sequence[Values], at: tuple[np.ndarray, ...]
) -> tuple[str, QuotientFit] | None:
    """Return the value computed from states alone whose gradient is ``at``."""
    forward = slope_meter.forward
    for seam in computed_weights(forward.graph, training.losses, set(training.batch), name, at[0].shape):
        is_input = seam in forward.graph.inputs
        value = points[0][seam] if is_input else forward.values([seam], points[0])[seam]
        part = Candidate(name, seam, value, tuple(with_layout(values, value) for values in at))
        moved = [{**point, seam: value} for point in points]
        for candidate in (part, *turned(part)):
            fit = slope_meter.measure([candidate], moved, QUICK, () if is_input else (seam,))
            if fit.holds:
                return seam, fit
    return None


def behind(
    slope_meter: SlopeMeter, training: TrainingGraph, part: Candidate, points: Sequence[Values], gradient: str
) -> tuple[str, QuotientFit, bool] | None:
    """A gradient through which alone ``gradient`` depends on the batch, the fit, and whether the dependence is
    linear."""
    forward, batch = slope_meter.forward, set(training.batch)
    near = dependent_values(forward.graph, gradient, batch, part.origin.size)
    names = list(islice((name for name in near if not forward.reads(gradient, (name,)) & batch), TRIES))
    results = side_by_side(partial(forward.values, names), points, forward.abreast) if names else []
    for name in names:
        values = [np.asarray(at[name]) for at in results]
        true = replace(part, at=tuple(with_layout(value.astype(np.float64), part.origin) for value in values))
        fit = slope_meter.measure([true], points, QUICK)
        if fit.holds:
            return name, fit, _linear(forward, points[0], gradient, name, values)
    return None


def _linear(forward: CheckedForward, point: Values, result: str, name: str, values: Sequence[np.ndarray]) -> bool:
    """Return whether ``result`` is linear in the value ``name``, up to a constant, at sums of observed values."""

    def at(value: np.ndarray) -> np.ndarray:
        array = forward.values([result], {**point, name: value.astype(values[0].dtype)}, (name,))[result]
        return np.asarray(array, np.float64)

    value_a, value_b = values[0], values[1]
    base = at(np.zeros_like(value_a))
    change_a, change_b = at(value_a) - base, at(value_b) - base
    largest = max(float(np.linalg.norm(change)) for change in (change_a, change_b))
    exact = 1e4 * forward.precision.rounding * (largest + float(np.linalg.norm(base)))
    sums = ((1, 1), (-3, 0.5), (40, 0), (0, -40))
    return all(
        float(np.linalg.norm(at(a * value_a + b * value_b) - base - a * change_a - b * change_b)) <= 100 * exact
        for a, b in sums
    )


def where_taken(
    slope_meter: SlopeMeter,
    training: TrainingGraph,
    parts: Sequence[Candidate],
    points: Sequence[Values],
    shifts: Mapping[str, str],
) -> QuotientFit:
    """A fit at the points reached by every rank's own batch: ``shifts`` names the moved parameters."""
    forward = slope_meter.forward
    values = [forward.values(list(shifts.values()), point) for point in points]
    if read_by(forward.graph, training.losses).isdisjoint(shifts.values()):
        # The losses are those before the move: their parameters are put there.
        placed = [{**point, **{name: at[shift] for name, shift in shifts.items()}} for point, at in zip(points, values)]
        return slope_meter.measure(parts, placed)
    moved = [{**point, **at} for point, at in zip(points, values)]
    names = [replace(part, name=shifts[part.parameter]) for part in parts]
    return slope_meter.measure(names, moved, None, tuple(shifts.values()))


def in_slices(slope_meter: SlopeMeter, part: Candidate, points: Sequence[Values]) -> QuotientFit | None:
    """A fit with ratios of slices along some axis, each with a separate factor; None for two points, between which any
    number is proportional."""
    if len(points) <= 2:
        return None
    peak = int(np.argmax(np.abs(part.changes[0] * part.moved)))
    entry = replace(part, inside=(np.arange(part.origin.size) == peak).reshape(part.origin.shape))
    fit = slope_meter.measure([entry], points, QUICK) if entry.moved.any() else None
    if fit is not None and fit.measured and not fit.holds:  # the entry lies in a slice along each axis
        return None
    for masks in _masks(part):
        fits = []
        for inside in masks:
            slice = replace(part, inside=inside)
            if slice.moved.any():
                fits.append(slope_meter.measure([slice], points, QUICK))
                if not fits[-1].holds:
                    break
        else:
            return replace(fits[0], ratios=tuple(ratio for fit in fits for ratio in fit.ratios[:1]))
    return None


def _masks(part: Candidate) -> Iterator[Iterator[np.ndarray]]:
    """For each axis of few slices, the slices; last, all entries one by one if few."""
    dims, size = part.origin.shape, part.origin.size
    for axis, length in enumerate(dims):
        if 1 < length <= SLICED and length < size:
            line = np.arange(length).reshape(-1, *(1,) * (len(dims) - axis - 1))
            yield _equal(np.broadcast_to(line, dims), length)
    if 1 < size <= SLICED:
        yield _equal(np.arange(size).reshape(dims), size)


def _equal(numbers: np.ndarray, count: int) -> Iterator[np.ndarray]:
    return (numbers == index for index in range(count))
