"""Gradients of many parameters compared with slopes of the loss, all moved together along gradient plus noise.

A direction has for every parameter the claimed gradient, of length one and of random sign (once a common factor of all
gradients is known), and noise: NOISE times the gradient's share, so that an error of any kind shows, also an error
orthogonal to the gradient (a missing term). Every parameter adds about one to the slope: a small gradient does not
drown in a large one. The loss changes by the same number of roundings in all, as little as can be measured: so short a
step crosses few kinks (of a ReLU, of a pool).

A slope agrees within the tolerance of one parameter's part. A rough slope, different by more at two lengths of the
step, agrees within three times the difference, up to ``ROUGH`` of one parameter's part: a wrong gradient of one
parameter is off by about all of its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from gopt.verification.gradient_check.forward import Precision, Values
from gopt.verification.piecewise import dot, normal, pieces
from gopt.verification.side_by_side import side_by_side

NOISE = 0.3
"""Share of the noise, relative to the gradient."""
ROUGH = 3e-3
"""Of one parameter's part: how far slopes of two lengths may be apart to stand for each other."""
APART = 3
"""Times that difference, which a slope may be off."""
WRONG = 10
"""Times ``ROUGH``: a value further off from slopes that stand for each other is wrong."""
SPREAD = 1e4
"""Largest over smallest change of the loss by a move of a thousandth, of parameters that are moved together."""
FAR = 0.05
"""Of a parameter: the longest move."""
FAINT = 1e-36
"""Length below which a gradient is not moved along: a direction divides by it, in float32."""
_GUESSES = 6
"""Steps by which an unknown factor is looked for."""
Loss = Callable[[Values], float]
Gradients = Mapping[str, np.ndarray]
Move = Callable[[Values, Gradients, float], Values]
"""Moves a point along a direction by a length."""


@dataclass(slots=True)
class _Group:
    """Parameters moved together. ``factor``: of gradients over slopes, None until known."""

    names: list[str]
    weakest: float
    factor: float | None
    ratios: list[float] = field(default_factory=list)
    lengths: dict[str, float] = field(default_factory=dict)
    """The largest gradient that was seen of each."""


@dataclass(frozen=True)
class SlopeCheck:
    """Moves parameters of one loss. ``factor``: a gradient over its slope; None for any common factor.

    ``masks``: entries to move, by parameter; others are moved as a whole. ``level``: the largest known loss: a loss
    near zero is often a difference of larger numbers, and rounds as they do. ``guess``: a factor to try first."""

    loss: Loss
    move: Move
    precision: Precision
    generator: np.random.Generator
    factor: float | None = None
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    level: float = 0.0
    guess: float | None = None
    abreast: int = 1
    """Losses that are computed at a time."""
    most: int | None = None
    """Lengths of the step; None for all."""

    def agreeing(
        self, looks: Iterable[tuple[Values, float, dict[str, np.ndarray]]], names: Sequence[str]
    ) -> Iterator[tuple[list[str], list[float], float]]:
        """The groups of ``names`` with gradients that agree at all looks, with ratios and factor.

        A look: a point, the loss, and the gradients there, in the shapes of the parameters; each gradient is taken out
        of the mapping after its last use."""
        groups: list[_Group] | None = None
        for point, level, gradients in looks:
            if not math.isfinite(level):
                return
            groups = self._groups(point, gradients, names) if groups is None else groups
            guess = self.guess  # gradients of one loss mostly have one factor: a group's is the next group's guess
            for group in groups[:]:
                if not self._agrees(group, point, level, gradients, guess):
                    groups.remove(group)
                guess = group.factor or guess
            if not groups:
                return
        for group in groups or ():
            yield [name for name in group.names if group.lengths.get(name)], group.ratios, group.factor or 1.0

    def _groups(self, point: Values, gradients: Gradients, names: Sequence[str]) -> list[_Group]:
        """Groups of parameters with about the same change of the loss for a relative move."""
        reach = {}
        for name in names:
            length = math.sqrt(dot(gradients[name], gradients[name]))
            if length > FAINT and math.isfinite(length):
                reach[name] = length * _usual(point[name]) / (1 + NOISE * math.sqrt(gradients[name].size))
        groups: list[_Group] = []
        largest = 0.0
        for name in sorted(reach, key=lambda name: -reach[name]):
            if not groups or largest > SPREAD * reach[name]:
                groups.append(_Group([], 0.0, self.factor))
                largest = reach[name]
            groups[-1].names.append(name)
            groups[-1].weakest = reach[name]
        return groups

    def _agrees(
        self, group: _Group, point: Values, level: float, gradients: dict[str, np.ndarray], guess: float | None
    ) -> bool:
        """Return whether the slope along a direction agrees with the gradients; ``guess``: a factor to try first."""
        direction, parts = self._direction(group, gradients)
        slope = cache(partial(self._slope, point, direction))
        if group.factor is None and guess is not None:
            group.factor = guess
            if self._is_slope(group, level, slope, parts, most=1):
                return True
            group.factor = None
        return self._is_slope(group, level, slope, parts, abs(guess or 1.0), self.most)

    def _is_slope(
        self, group: _Group, level: float, slope_at: Callable[[float], float], parts: Sequence[float],
        near: float = 1.0, most: int | None = None,
    ) -> bool:  # fmt: skip
        """``near``: about an unknown factor; ``most``: lengths of the step."""
        wanted, one = sum(parts), math.sqrt(sum(part * part for part in parts) / max(len(parts), 1))
        if not one or not math.isfinite(wanted):
            return False
        rounding = self.precision.rounding * max(abs(level), self.level, 1e-300)
        due = self.precision.tolerance * one
        total = one * math.sqrt(len(parts))
        factor, measured = group.factor, None
        if factor is None:
            factor, measured = self._guess(slope_at, rounding, wanted, total, near)
        slopes: list[float] = []
        for number, count in enumerate(self.precision.changes):
            step = count * rounding * abs(factor) / total
            if len(slopes) == most:
                break
            if step > FAR * group.weakest:
                continue
            slope = measured if measured is not None and number == 0 else slope_at(step)
            if not math.isfinite(slope) or not slope:
                continue
            factor = group.factor or wanted / slope
            error = abs(wanted - factor * slope)
            rough = min((abs(factor) * abs(slope - previous) for previous in slopes), default=math.inf)
            slopes.append(slope)
            # Two lengths that agree make a factor known; it is what others are compared by.
            if (rough <= ROUGH * one and error <= APART * rough) or (group.factor is not None and error <= due):
                group.factor = factor
                group.ratios.append(round(wanted / slope, 6))
                return True
            if rough <= ROUGH * one and error > WRONG * ROUGH * one:
                break
        return False

    def _guess(
        self, slope_at: Callable[[float], float], rounding: float, wanted: float, total: float, factor: float
    ) -> tuple[float, float | None]:
        """The approximate ratio of gradients and slopes, by a step with the wanted change of the loss, and the slope
        there; ``factor``: the first guess."""
        for _ in range(_GUESSES):
            step = self.precision.changes[0] * rounding * factor / total
            slope = slope_at(step)
            if not math.isfinite(slope) or abs(slope) * step < 100 * rounding:
                factor *= 1e4 if math.isfinite(slope) else 1e-4
                continue
            before, factor = factor, abs(wanted / slope)
            if 0.5 < factor / before < 2:
                return factor, slope
        return factor, None

    def _direction(self, group: _Group, gradients: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[float]]:
        """A direction, and each parameter's part of the slope."""
        direction, parts = {}, []
        for name in group.names:
            gradient = gradients.pop(name)
            length = math.sqrt(dot(gradient, gradient))
            usual = group.lengths[name] = max(length, group.lengths.get(name, 0.0))
            # A factor is learnt from parts that add up: where they cancel, rounding is a large share of their sum.
            sign = 1 if self.generator.random() < 0.5 or group.factor is None else -1
            share = np.float32(NOISE / (usual or 1.0))
            reusable = gradient.dtype == np.float32 and gradient.flags.c_contiguous and gradient.flags.writeable
            buffer = gradient if reusable else np.empty(gradient.shape, np.float32)
            mask = self.masks.get(name)
            part = 0.0
            drawn = normal(self.generator, buffer.size, np.float32)
            for (mine, theirs, *inside), numbers in zip(
                pieces(buffer, gradient, *([] if mask is None else [mask])), drawn
            ):
                noise = numbers * share
                noise += np.asarray(theirs, np.float64) * (sign / length / usual) if length else 0
                noise *= inside[0] if inside else 1
                part += float(np.dot(np.asarray(theirs, np.float64), noise))
                mine[:] = noise
            direction[name] = buffer
            parts.append(part)
        return direction, parts

    def _slope(self, point: Values, direction: Gradients, step: float) -> float:
        def moved(length: float) -> float:
            return self.loss(self.move(point, direction, length))

        above, below = side_by_side(moved, (step, -step), self.abreast)
        return (above - below) / (2 * step)


def _usual(value: np.ndarray) -> float:
    """The length of a parameter; a near-zero parameter counts as a hundredth an element."""
    return max(float(np.linalg.norm(value)), 1e-2 * math.sqrt(value.size))
