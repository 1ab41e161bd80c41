"""Samples one parameter's update at chosen points, and the new values of its states there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.offline.optimizer.numpy_ops import Array
from gopt.offline.optimizer.probe_harness import Scalars
from gopt.offline.optimizer.update_function import UpdateFunction

EXACT = 1e-8
"""Relative tolerance within which a rule must fit."""
_POINTS, _SIGNED = 52, 36
"""Random points, and the place of the first whose states have any sign."""
_FEWEST = 12
"""Random points that must be finite."""


def close(value: float | None, other: float, tolerance: float = 1e-6) -> bool:
    return value is not None and bool(abs(value - other) <= tolerance * max(abs(value), abs(other)) + 1e-300)


def _agreeing(value: Array, other: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(np.abs(value - other) <= EXACT * (np.abs(value) + np.abs(other)) + 1e-13)


class Sampler:
    """Calls an update on columns: gradient, parameter, then the states. ``truth``: its results at random points.

    The points: states that are positive, large and small against the gradient, some that are large with it, and some of
    any sign. Where the update is not finite, as under a root of a negative state, a point is left out.
    """

    def __init__(self, update_fn: UpdateFunction, scalars: Scalars, names: Sequence[str]) -> None:
        """``names``: of the gradient, the parameter and the states, in the order in which the function returns them."""
        self.update_fn, self.scalars, self.names = update_fn, scalars, list(names)
        self.count = len(names) - 1
        rng = np.random.default_rng(7)
        points = rng.normal(size=(self.count + 1, _POINTS))
        points[2:, :_SIGNED] = np.abs(points[2:, :_SIGNED])
        points[2:, 1:16:2] *= 10.0 ** -np.arange(8.0)
        points[2:, 16:32] *= 1e-3
        points[:, 32:_SIGNED] *= 10.0 ** np.arange(1.0, 5.0)
        found = self._call(*points)
        finite = np.zeros(_POINTS, bool) if found is None else np.isfinite(np.array(found)).all(axis=0)
        if finite[:_SIGNED].sum() < _FEWEST:  # one point may spoil them all, where a norm is taken
            finite = np.arange(_POINTS) < _SIGNED
        self._random, self._signed = points[:, finite], np.flatnonzero(finite) >= _SIGNED
        self.g, self.p = self._random[0], self._random[1]
        """Gradient and parameter at the random points."""
        self.truth = [] if found is None else self._call(*self._random) or []

    @property
    def usable(self) -> bool:
        """Whether the update can be run, and stays finite."""
        return bool(self.truth) and all(np.isfinite(value).all() for value in self.truth)

    def state(self, place: int) -> Array:
        """The state at ``place``, from 1, at the random points."""
        value: Array = self._random[place + 1]
        return value

    def explains(self, value: Array, place: int = 0) -> bool:
        """Return whether this is the new parameter, or the state at ``place``, at the random points.

        NaN and infinity are ignored where a state that cannot be negative is negative.
        """
        unknown = self._signed & ~np.isfinite(value)
        return bool(np.all(_agreeing(value, self.truth[place]) | unknown))

    def at(self, **columns: Sequence[float] | Array) -> list[Array] | None:
        """New values at points; a column that is not named is 0."""
        length = len(next(iter(columns.values())))
        names = ["g", "p", *(f"s{place}" for place in range(1, self.count))]
        return self._call(*(np.asarray(columns.get(name, np.zeros(length)), np.float64) for name in names))

    def _call(self, g: Array, *states: Array) -> list[Array] | None:
        with np.errstate(all="ignore"):
            return self.update_fn(self.scalars, dict(zip(self.names, (g, *states), strict=True)))


@dataclass(frozen=True, slots=True)
class Form:
    """A state's new value: ``mean`` b·s + q·(g + w·p), ``square`` b·s + q·(g + w·p)², ``peak`` max(b·s, |…| + e),
    ``maximum`` max(s, new value of the square state), ``other``: none of these."""

    kind: str
    keep: float
    take: float
    decay: float = 0.0
    eps: float = 0.0

    def new(self, s: Array, g: Array, p: Array) -> Array:
        value = g + self.decay * p
        if self.kind == "mean":
            return self.keep * s + self.take * value
        if self.kind == "square":
            return self.keep * s + self.take * value**2
        return np.maximum(self.keep * s, np.abs(value) + self.eps)

    def old(self, new: Array, g: Array, p: Array) -> Array:
        """The old value that becomes ``new``; of a peak, where it outweighs the gradient."""
        value = g + self.decay * p
        taken = {"mean": self.take * value, "square": self.take * value**2}.get(self.kind, 0.0)
        return (new - taken) / self.keep


def find_forms(sampler: Sampler) -> list[Form]:
    """The form of every state's new value, in order."""
    found: dict[int, Form] = {}
    places = range(1, sampler.count)
    for place in (*places, *places):  # twice: a maximum is known after what it is a maximum of
        form = found.get(place) or _form(sampler, place, found)
        if form is not None:
            found[place] = form
    return [found.get(place, Form("other", 0.0, 0.0)) for place in places]


def _form(sampler: Sampler, place: int, known: Mapping[int, Form]) -> Form | None:
    """The form of the new value of the state at ``place``."""
    new = sampler.at(**{f"s{place}": [0, 1, 0, 0, 0], "g": [0, 0, 1, 0, 2], "p": [0, 0, 0, 1, 0]})
    if new is None:
        return None
    nothing, keep, take, decay, double = map(float, new[place])
    forms = []
    if nothing == 0 and take and abs(double - 2 * take) < 1e-9 * abs(take):
        forms.append(Form("mean", keep, take, decay / take))
    if nothing == 0 and take > 0 and decay >= 0 and abs(double - 4 * take) < 1e-9 * take:
        forms.append(Form("square", keep, take, float(np.sqrt(decay / take))))
    forms.append(Form("peak", keep, 1.0, decay - nothing, nothing))
    for form in forms:
        if sampler.explains(form.new(sampler.state(place), sampler.g, sampler.p), place):
            return form
    squares = [other for other, form in known.items() if form.kind == "square"]
    if any(sampler.explains(np.maximum(sampler.state(place), sampler.truth[other]), place) for other in squares):
        return Form("maximum", 1.0, 0.0)
    return None
