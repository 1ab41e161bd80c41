"""Gradients of many parameters held against slopes of the loss itself, all moved together along gradient plus noise.

A direction has for every parameter its own claimed gradient, of length one and of random sign, and noise: the share of
the noise is NOISE of what the gradient has, so that an error of any kind shows, also one that is orthogonal to the
gradient (a missing term). Every parameter adds about one to the slope: a small gradient does not drown in a large one.
The loss changes by the same number of roundings in all, as little as can be measured: a step so short crosses few kinks
(of a ReLU, of a pool).

A slope agrees where it is within the tolerance of one parameter's part. Where it is rough, which is where two lengths of
the step give slopes that differ by more, it agrees within three times that difference, up to ``ROUGH`` of one
parameter's part: a wrong gradient of one parameter is off by about all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.verification.gradient_check.forward import Precision, Values

NOISE = 0.3
"""Share of the noise, relative to the gradient."""
ROUGH = 3e-3
"""Of one parameter's part: how far slopes of two lengths may be apart to stand for each other."""
APART = 3
"""Times that difference, which a slope may be off."""
SPREAD = 1e4
"""Largest over smallest change of the loss by a move of a thousandth, of parameters that are moved together."""
FAR = 0.05
"""Of a parameter: the longest move."""
Loss = Callable[[Values], float]
Gradients = Mapping[str, np.ndarray]


@dataclass(slots=True)
class _Group:
    """Parameters that are moved together. ``factor``: of gradients over slopes, None until it is known."""

    names: list[str]
    weakest: float
    factor: float | None
    ratios: list[float] = field(default_factory=list)
    lengths: dict[str, float] = field(default_factory=dict)
    """The largest gradient that was seen of each."""


@dataclass(frozen=True)
class SlopeCheck:
    """Moves parameters of one loss. ``factor``: what a gradient is of the slope; None for any, if it is the same of all.

    ``masks``: entries to move, by parameter; others are moved as a whole.
    """

    loss: Loss
    precision: Precision
    generator: np.random.Generator
    factor: float | None = None
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)

    def agreeing(
        self, looks: Iterable[tuple[Values, float, Gradients]], names: Sequence[str]
    ) -> Iterator[tuple[list[str], list[float]]]:
        """The groups of ``names`` whose gradients agree at all looks, with their ratios.

        A look: a point, its loss, and what is called gradients there, in the shapes of the parameters.
        """
        groups: list[_Group] | None = None
        for point, level, gradients in looks:
            if not math.isfinite(level):
                return
            groups = self._groups(point, gradients, names) if groups is None else groups
            groups = [group for group in groups if self._agrees(group, point, level, gradients)]
            if not groups:
                return
        for group in groups or ():
            yield [name for name in group.names if group.lengths.get(name)], group.ratios

    def _groups(self, point: Values, gradients: Gradients, names: Sequence[str]) -> list[_Group]:
        """Groups of parameters of which a relative move changes the loss by about the same."""
        reach = {}
        for name in names:
            length = float(np.linalg.norm(gradients[name]))
            if length and math.isfinite(length):
                reach[name] = length * _usual(point[name]) / (1 + NOISE * math.sqrt(gradients[name].size))
        groups: list[_Group] = []
        first = 0.0
        for name in sorted(reach, key=lambda name: -reach[name]):
            if not groups or first > SPREAD * reach[name]:
                groups.append(_Group([], 0.0, self.factor))
                first = reach[name]
            groups[-1].names.append(name)
            groups[-1].weakest = reach[name]
        return groups

    def _agrees(self, group: _Group, point: Values, level: float, gradients: Gradients) -> bool:
        """Return whether the slope along one direction is what the gradients say."""
        direction, parts = self._direction(group, gradients)
        wanted, one = sum(parts), math.sqrt(sum(part * part for part in parts) / max(len(parts), 1))
        if not one or not math.isfinite(wanted):
            return False
        total = one * math.sqrt(len(parts))
        due, known = self.precision.tolerance * one, list[float]()
        for count in self.precision.changes:
            change = count * self.precision.rounding * max(abs(level), 1e-300)
            step = change / total
            if change / math.sqrt(len(parts)) > FAR * group.weakest:
                continue
            slope = self._slope(point, direction, step)
            if not math.isfinite(slope) or not slope:
                continue
            factor = group.factor
            if factor is None:
                if not known:
                    known.append(slope)
                    continue
                factor = wanted / slope
            error = abs(wanted - factor * slope)
            rough = min((abs(factor) * abs(slope - other) for other in known), default=math.inf)
            if group.factor is None:  # two lengths that agree make it known
                if rough > max(due, ROUGH * one):
                    known.append(slope)
                    continue
                group.factor = factor
            elif error > due and not (rough <= ROUGH * one and error <= APART * rough):
                known.append(slope)
                continue
            group.ratios.append(round(wanted / slope, 6))
            return True
        return False

    def _direction(self, group: _Group, gradients: Gradients) -> tuple[dict[str, np.ndarray], list[float]]:
        """A direction, and what each parameter adds to its slope."""
        direction, parts = {}, []
        for name in group.names:
            gradient = gradients[name]
            length = float(np.linalg.norm(gradient))
            group.lengths[name] = max(length, group.lengths.get(name, 0.0))
            noise = self.generator.standard_normal(gradient.shape, np.float32)
            sign = 1 if self.generator.random() < 0.5 else -1
            noise *= np.float32(NOISE)
            if length:
                noise += (gradient * (sign / length)).astype(np.float32)
            if group.lengths[name]:
                noise /= np.float32(group.lengths[name])
            if name in self.masks:
                noise *= self.masks[name]
            direction[name] = noise
            parts.append(float(np.vdot(gradient, noise)))
        return direction, parts

    def _slope(self, point: Values, direction: Mapping[str, np.ndarray], step: float) -> float:
        ends = []
        for sign in (1, -1):
            moved = dict(point)
            for name, along in direction.items():
                moved[name] = point[name] + (sign * step) * along.astype(point[name].dtype)
            ends.append(self.loss(moved))
        return (ends[0] - ends[1]) / (2 * step)


def _usual(value: np.ndarray) -> float:
    """The length of a parameter; one that is next to zero counts as a hundredth an element."""
    return max(float(np.linalg.norm(value)), 1e-2 * math.sqrt(value.size))
