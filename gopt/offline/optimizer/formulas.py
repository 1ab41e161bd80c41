"""The formulas of the optimizers, as records: the forms of an update's states choose the candidates.

The new parameter is a sum of known columns, such as the parameter and the first moment over the root of the second:
least squares at random points gives the factors, and the formula is believed only if the sum reproduces the points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gopt.offline.optimizer.probe import Array, Scalars, UpdateFunction

Hyper = float | bool | None
ABOUT = 2e-5
"""Relative tolerance between two stored constants such as 0.9 and 1 - 0.9."""
Column = Sequence[float] | Array | float
_EXACT = 1e-8
"""Relative tolerance within which a formula must fit."""
_POINTS, _SIGNED = 52, 36
"""Random points, and the place of the first whose states have any sign."""
_LEAST = 1e-24
"""The square near 0 that a root is taken of: above the rounding of a state, below the square of every epsilon."""
_FEWEST = 12
"""Random points that must be finite."""


def close(value: float, target: float, tolerance: float = 1e-6) -> bool:
    return bool(abs(value - target) <= tolerance * max(abs(value), abs(target)) + 1e-300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A formula's coefficients for one choice of the scalar inputs.

    ``kept``: factor of the parameter when gradient and moments are 0; ``coupled``: factor of the parameter in the term
    added to the gradient, in LAMB to the direction. ``flipped``: the step goes up the gradient. ``direct``: beside a
    first moment, the factor of the gradient itself; beside an average of the parameter, the weight of the new
    parameter."""

    kind: str = ""
    roles: tuple[str, ...] = ()
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    size: float
    kept: float = 1.0
    coupled: float = 0.0
    eps: float = 0.0
    inside: bool = False
    flipped: bool = False
    direct: float = 0.0


@dataclass(frozen=True, slots=True)
class Form:
    """A state's new value: ``mean`` b·s + q·(g + w·p), ``square`` b·s + q·(g + w·p)², ``peak`` max(b·s, |…| + e),
    ``maximum`` max(s, new value of the square state), ``other``: none of these. ``at``: the state's place, from 1."""

    at: int
    kind: str = "other"
    keep: float = 0.0
    take: float = 0.0
    decay: float = 0.0
    eps: float = 0.0

    def _taken(self, g: Array, p: Array) -> Array:
        value = g + self.decay * p
        return self.take * (value**2 if self.kind == "square" else value)

    def new(self, s: Array, g: Array, p: Array) -> Array:
        if self.kind == "peak":
            return np.maximum(self.keep * s, np.abs(self._taken(g, p)) + self.eps)
        return self.keep * s + self._taken(g, p)

    def old(self, new: Array, g: Array, p: Array) -> Array:
        """The old value that becomes ``new``; of a peak, where the old value outweighs the gradient."""
        return (new - (0.0 if self.kind == "peak" else self._taken(g, p))) / self.keep


class Sampler:
    """Calls an update on columns: gradient, parameter, then the states. ``truth``: the results at random points.

    The points: positive states, large and small against the gradient, some large with it, and some of any sign. Where
    the update is not finite, as under a root of a negative state, a point is left out."""

    def __init__(self, update_fn: UpdateFunction, scalars: Scalars, names: Sequence[str]) -> None:
        """``names``: of the gradient, the parameter and the states, in the function's order of results."""
        self.update_fn, self.scalars, self.names = update_fn, scalars, list(names)
        rng = np.random.default_rng(7)
        points = rng.normal(size=(len(names), _POINTS))
        points[2:, :_SIGNED] = np.abs(points[2:, :_SIGNED])
        points[2:, 1:16:2] *= 10.0 ** -np.arange(8.0)
        points[2:, 16:32] *= 1e-3
        points[:, 32:_SIGNED] *= 10.0 ** np.arange(1.0, 5.0)
        finite = np.asarray(np.isfinite(self.call(points)).all(axis=0))
        if finite[:_SIGNED].sum() < _FEWEST:  # one point may spoil them all, where a norm is taken
            finite = np.arange(_POINTS) < _SIGNED
        self.points, self._signed = points[:, finite], np.flatnonzero(finite) >= _SIGNED
        self.g, self.p = self.points[0], self.points[1]
        """Gradient and parameter at the random points."""
        self.truth = self.call(self.points)
        self.forms = [Form(index) for index in range(1, len(names) - 1)]
        """The form of every state's new value, in order."""
        for form in self.forms * 2:  # twice: a maximum is known after what it is a maximum of
            if self.forms[form.at - 1].kind == "other" and np.isfinite(self.truth).all():
                self.forms[form.at - 1] = self._form(form.at)
        self.of = {form.kind: form for form in self.forms}
        """Kind -> the form of the one state of this kind."""

    @cached_property
    def few(self) -> Array:
        """The results where every other point is left out: a norm is another norm there."""
        return self.call(self.points[:, ::2])

    def call(self, columns: Array) -> Array:
        """The new values; NaN where the update cannot be run."""
        results = self.update_fn(self.scalars, dict(zip(self.names, columns, strict=True)))
        return np.full((len(columns) - 1, columns.shape[1]), np.nan) if results is None else np.array(results)

    def at(
        self, g: Column, p: Column = 0.0, new: Mapping[int, Column] = {}, old: Mapping[int, Column] = {}
    ) -> Array:  # fmt: skip
        """New values at points; states, by place from 1, become ``new`` or start from ``old``, else from 0."""
        columns = np.zeros((len(self.names), len(np.atleast_1d(g))))
        columns[0], columns[1] = g, p
        for index, values in new.items():
            columns[index + 1] = self.forms[index - 1].old(np.asarray(values), columns[0], columns[1])
        for index, values in old.items():
            columns[index + 1] = values
        return self.call(columns)

    def factors(self, columns: Sequence[Array], index: int = 0) -> list[float] | None:
        """The factors with which the sum of columns is the new parameter, or the state at ``index``, by least squares
        of relative errors; a factor within 1e-12 of a whole number is this number."""
        table, truth = np.array(columns).T, self.truth[index]
        rows = np.isfinite(table).all(axis=1)
        weights = 1 / np.abs(table[rows]).max(axis=1)
        solved = np.linalg.lstsq(table[rows] * weights[:, None], truth[rows] * weights, rcond=None)[0]
        solved = np.where(np.abs(solved - solved.round()) < 1e-12, solved.round(), solved)
        return [*map(float, solved)] if self.explains(table @ solved, index) else None

    def explains(self, value: Array, index: int = 0) -> bool:
        """Return whether this is the new parameter, or the state at ``index``, at the random points.

        NaN and infinity are ignored where a state that cannot be negative is negative.
        """
        truth = self.truth[index]
        alike = np.abs(value - truth) <= _EXACT * (np.abs(value) + np.abs(truth)) + 1e-13
        return bool(np.all(alike | (self._signed & ~np.isfinite(value))))

    def _form(self, index: int) -> Form:
        """The form of the new value of the state at ``index``."""
        probes = self.at([0, 0, 1, 0, 2], [0, 0, 0, 1, 0], old={index: [0, 1, 0, 0, 0]})[index]
        nothing, keep, take, decay, double = map(float, probes)
        forms = []
        if nothing == 0 and take and abs(double - 2 * take) < 1e-9 * abs(take):
            forms.append(Form(index, "mean", keep, take, decay / take))
        if nothing == 0 and take > 0 and decay >= 0 and abs(double - 4 * take) < 1e-9 * take:
            forms.append(Form(index, "square", keep, take, float(np.sqrt(decay / take))))
        forms.append(Form(index, "peak", keep, 1.0, decay - nothing, nothing))
        for form in forms:
            if self.explains(form.new(self.points[index + 1], self.g, self.p), index):
                return form
        for square in (form.at for form in self.forms if form.kind == "square"):
            if self.explains(np.maximum(self.points[index + 1], self.truth[square]), index):
                return Form(index, "maximum", 1.0)
        return Form(index)


@dataclass(frozen=True, slots=True)
class Root:
    """A denominator: the root of a state, with epsilon inside or beside."""

    inside: bool = False
    eps: float = 0.0

    def of(self, square: Array) -> Array:
        return np.asarray(np.sqrt(square + self.eps) if self.inside else np.sqrt(square) + self.eps)


def roots(bare: float, full: float, least: float) -> list[Root]:
    """The roots whose quotients are ``bare`` at the square ``least``, and ``full`` at the square 1, epsilon beside the
    root first."""
    ratio = bare / full if full else float("nan")
    if not ratio > 1 or not np.isfinite(bare):
        return [Root()] if full and not np.isfinite(bare) else []
    beside, inside = (1 - ratio * float(np.sqrt(least))) / (ratio - 1), (1 - ratio**2 * least) / (ratio**2 - 1)
    return [Root(False, beside if abs(beside) > 1e-14 else 0.0), Root(True, inside)]


def _roots(sampler: Sampler, below: str = "square", gathered: Form | None = None) -> list[Root]:
    """The possible denominators: a step, or the state that gathers the steps, is taken over a square near 0 and over 1.

    The third point, a parameter alone, gives LAMB a norm."""
    if below == "one":
        return [Root()]
    mean, second = sampler.of.get("mean"), sampler.of["peak" if below == "peak" else "square"]
    moment = mean is not None and below != "centred"
    g = 0.0 if moment else 1e-6  # so small that the square of the gradient does not hide a small moment
    states: dict[int, Column] = {mean.at: [moment, moment, 0]} if mean else {}
    new = sampler.at([g, g, 0], [0, 0, 1], states | {second.at: [_LEAST, 1, 1]})
    bare, full = map(float, (new[gathered.at] if gathered else -new[0])[:2])
    return roots(bare, full, float(new[second.at][0]) ** (2 if below == "peak" else 1))


def _averages(sampler: Sampler, below: str) -> bool:
    """Return whether the moments are averages of the same gradient with decay."""
    mean, second = sampler.of.get("mean"), sampler.of.get("square", sampler.of.get("peak"))
    if second is None:
        return mean is None or bool(mean.keep)
    if mean is not None:
        apart = abs(mean.decay - second.decay)
        tied = apart <= 1e-6 * max(abs(mean.decay), abs(second.decay)) + 1e-12
        if not tied or not mean.keep or not close(mean.take, 1 - mean.keep, 1e-4):
            return False
        if below == "centred" and not close(mean.keep, second.keep):
            return False
    summed = second.keep == 1 and close(second.take, 1.0) and len(sampler.forms) == 1
    return bool(second.keep) and (second.kind == "peak" or summed or close(second.take, 1 - second.keep, 1e-3))


def _quotient(formula: Formula, sampler: Sampler) -> Fit | None:
    """kept·p - (size·mean + direct·(g + w·p)) / root of ``below``; or a state gathers the steps, and is subtracted."""
    if not _averages(sampler, formula.below):
        return None
    new = {kind: sampler.truth[form.at] for kind, form in sampler.of.items()}
    mean, second, steps = (
        sampler.of.get("mean"),
        sampler.of.get("square", sampler.of.get("peak")),
        sampler.of.get("other"),
    )
    moment = mean is not None and formula.below != "centred"
    decayed = mean if moment else second
    w, p = decayed.decay if decayed else 0.0, sampler.p
    above = [new["mean"]] if moment else []
    if formula.direct or not moment:
        above.append(sampler.g + w * p)
    for root in _roots(sampler, formula.below, steps):
        quotients = [value / root.of(_BELOW[formula.below](new)) for value in above]
        gathered = sampler.factors([sampler.points[steps.at + 1], *quotients], steps.at) if steps else [0.0, 1.0]
        moved = sampler.factors([p, *([-new["other"]] if steps else [-value for value in quotients])])
        if gathered is not None and moved is not None and moved[1] and not (root.inside and formula.below == "peak"):
            return Fit(
                size=moved[1] * gathered[1], kept=moved[0], coupled=w, direct=sum(moved[2:]), inside=root.inside,
                eps=(second.eps if second else 0.0) or root.eps, hyper={"momentum": gathered[0]} if steps else {},
            )  # fmt: skip
    return None


def _momentum(formula: Formula, sampler: Sampler) -> Fit | None:
    """A mean of gradients, or with Nesterov's look ahead the gradient beside it; the state may hold the rate."""
    fit, form = _quotient(formula, sampler), sampler.forms[0]
    if fit is None:
        return None
    slope, direct, b, total = fit.size, fit.direct, form.keep, fit.size * form.take
    if direct and not close(total / direct, b, ABOUT):
        return None
    # Any other factor of the gradient may as well be a scale of the loss.
    averaged = not direct and close(abs(form.take), 1 - b, 1e-3)
    dampening: Hyper = 0.0 if close(abs(form.take), 1.0) else b if averaged else None
    size = abs(slope / b if direct else slope) * (-1 if total < 0 else 1)
    if slope < 0 <= total:  # the learning rate is folded into the buffer
        dampening, size = 0.0, direct or total
    hyper = {"momentum": b, "nesterov": bool(direct), "dampening": dampening}
    coupled = float("nan") if dampening is None and fit.coupled else fit.coupled
    return replace(fit, hyper=hyper, size=size, coupled=coupled, direct=0.0)


def _lamb(formula: Formula, sampler: Sampler) -> Fit | None:
    """Adam's direction plus decay, scaled by |parameter| / |direction|: believed if so at half of the points, too."""
    mean, second, p = sampler.of["mean"], sampler.of["square"], sampler.p
    for root in _roots(sampler) if _averages(sampler, "square") and not mean.decay else ():
        moments = sampler.truth[mean.at] / root.of(sampler.truth[second.at])
        factor, pace = sampler.factors([p, -moments]) or (0.0, 0.0)
        if pace:
            direction = moments + (1 - factor) / pace * p
            size = pace * float(np.linalg.norm(direction) / np.linalg.norm(p))
            few, far = p[::2], direction[::2]
            due = few - size * np.linalg.norm(few) * far / np.linalg.norm(far)
            if np.allclose(sampler.few[0], due, _EXACT, 1e-13):
                return Fit(size=size, eps=root.eps, inside=root.inside, coupled=(1 - factor) / abs(pace))
    return None


def _lion(formula: Formula, sampler: Sampler) -> Fit | None:
    """Steps of one size along the sign of a mean, taken before the state's own mean."""
    form, w = sampler.forms[0], sampler.forms[0].decay
    new = sampler.at([0, -w], [0, 1], old={1: [1, 0]})[0]
    size, factor = -float(new[0]), float(new[1])
    low, high = 1e-6, 1e6
    for _ in range(6):
        points = np.geomspace(low, high, 200)
        turned = np.flatnonzero(sampler.at(-points, old={1: np.ones(200)})[0] * size > 0)
        if not turned.size or not turned[0]:
            return None
        low, high = points[turned[0] - 1], points[turned[0]]
    ratio = float(np.sqrt(low * high))
    direction = np.sign(ratio * sampler.points[2] + sampler.g + w * sampler.p)
    if not sampler.explains(factor * sampler.p - size * direction) or not close(form.take, 1 - form.keep, 1e-4):
        return None
    return Fit(hyper={"beta1": ratio / (1 + ratio), "beta2": form.keep}, size=size, kept=factor, coupled=w)


def _asgd(formula: Formula, sampler: Sampler) -> Fit | None:
    """Gradient descent beside a running average of the parameter."""
    moved = sampler.factors([sampler.p, -sampler.g])
    average = sampler.factors([sampler.points[2], sampler.truth[0]], 1)
    if moved is None or average is None or not moved[1] or not close(average[0], 1 - average[1]):
        return None
    return Fit(kept=moved[0], size=moved[1], direct=average[1])


def _adadelta(formula: Formula, sampler: Sampler) -> Fit | None:
    """Steps of the size of earlier steps: root of their mean square / root of the gradients'."""
    square, k = sampler.of["square"], sampler.of["other"].at
    u = sampler.points[k + 1]
    for root in _roots(sampler)[1:] if _averages(sampler, "square") else ():
        delta = root.of(u) / root.of(sampler.truth[square.at]) * (sampler.g + square.decay * sampler.p)
        moved, shares = sampler.factors([sampler.p, -delta]), sampler.factors([u, delta**2], k)
        if moved is not None and shares is not None and np.allclose(shares, [square.keep, square.take], 1e-6):
            return Fit(size=moved[1], kept=moved[0], coupled=square.decay, eps=root.eps, inside=True)
    return None


def _rprop(formula: Formula, sampler: Sampler) -> Fit | None:
    """A step size for each element, growing while the gradient keeps its sign and shrinking at a turn."""
    for prev, size in ((1, 2), (2, 1)):
        least, most = map(float, sampler.at([0, 0], old={size: [0.0, 1e30]})[size])
        if not 0 < least < most:
            continue
        middle = float(np.sqrt(least * min(most, 1e6)))
        plus, minus = map(float, sampler.at([1, 1], old={prev: [1.0, -1.0], size: [middle, middle]})[size] / middle)
        if not 0 < minus < 1 < plus or not least < middle * minus < middle * plus < most:
            continue
        turn = np.sign(sampler.g * sampler.points[prev + 1])
        steps = sampler.points[size + 1] * np.where(turn > 0, plus, np.where(turn < 0, minus, 1.0))
        steps, gradient = np.clip(steps, least, most), np.where(turn < 0, 0.0, sampler.g)
        good = sampler.explains(sampler.p - np.sign(gradient) * steps)
        if good and sampler.explains(gradient, prev) and sampler.explains(steps, size):
            hyper: dict[str, Hyper] = {"etaminus": minus, "etaplus": plus, "step_size_min": least}
            hyper["step_size_max"] = most if most < 1e30 else None
            return Fit(roles=("last gradient", "step sizes")[:: 2 * size - 3], hyper=hyper, size=0.0)
    return None


@dataclass(frozen=True, slots=True)
class Formula:
    """The update of an optimizer. ``states``: the sorted forms of the states. ``fit``: finds the coefficients; of a
    quotient, ``below``: the square of the denominator, ``direct``: the gradient may have a part of its own beside the
    mean, ``summed``: squares are summed and not averaged. ``keeps``: hyper-parameter -> the state whose old value has
    this factor; ``facts``: further hyper-parameters; ``roles``: form -> role of the state."""

    name: str
    states: tuple[str, ...] = ()
    below: str = "one"
    keeps: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Hyper] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    direct: bool = False
    summed: bool = False
    fit: Callable[[Formula, Sampler], Fit | None] = _quotient


_BELOW: Mapping[str, Callable[[Mapping[str, Array]], Array]] = {
    "one": lambda new: np.ones(1),
    "square": lambda new: new.get("maximum", new["square"]),
    "peak": lambda new: new["peak"] ** 2,
    "centred": lambda new: new["square"] - new["mean"] ** 2,
}
"""The square of a denominator, of the new states by kind."""
_ROLES = {"mean": "first moment", "square": "second moment", "peak": "infinity norm", "maximum": "maximum of it"}
_BETAS = {"beta1": "mean", "beta2": "square"}
_STEPS = {"mean": "mean gradient", "other": "momentum"}
FORMULAS = (
    Formula("SGD"),
    Formula("momentum", ("mean",), roles={"mean": "momentum"}, direct=True, fit=_momentum),
    Formula("Lion", ("mean",), roles={"mean": "momentum"}, fit=_lion),
    Formula("ASGD", ("mean",), roles={"mean": "average of the parameter"}, fit=_asgd),
    Formula("Adagrad", ("square",), "square", roles={"square": "sum of squares"}, summed=True),
    Formula("RMSProp", ("square",), "square", {"alpha": "square"}),
    Formula("RMSProp", ("other", "square"), "square", {"alpha": "square"}, roles=_STEPS),
    Formula("Adadelta", ("other", "square"), keeps={"rho": "square"}, roles={"other": "second moment of the steps"},
            fit=_adadelta),
    Formula("Adam", ("mean", "square"), "square", _BETAS),
    Formula("NAdam", ("mean", "square"), "square", _BETAS, direct=True),
    Formula("LAMB", ("mean", "square"), keeps=_BETAS, fit=_lamb),
    Formula("unrectified", ("mean", "square"), "one", _BETAS),
    Formula("RMSProp", ("mean", "square"), "centred", {"alpha": "square"}, {"centered": True}, _STEPS),
    Formula("RMSProp", ("mean", "other", "square"), "centred", {"alpha": "square"}, {"centered": True}, _STEPS),
    Formula("Adam", ("maximum", "mean", "square"), "square", _BETAS, {"amsgrad": True}),
    Formula("NAdam", ("maximum", "mean", "square"), "square", _BETAS, {"amsgrad": True}, direct=True),
    Formula("Adamax", ("mean", "peak"), "peak", {"beta1": "mean", "beta2": "peak"}),
    Formula("Rprop", ("other", "other"), fit=_rprop),
)  # fmt: skip
"""Of formulas with the same states, the first that matches is believed."""


def fit_update(update_fn: UpdateFunction, scalars: Scalars, names: Sequence[str]) -> Fit | None:
    """The formula, with coefficients, of an update of these values (gradient, parameter, then states), or None."""
    with np.errstate(all="ignore"):
        sampler = Sampler(update_fn, scalars, names)
        if not np.isfinite(sampler.truth).all():
            return None
        kinds, norms = [form.kind for form in sampler.forms], update_fn.reduces
        tried = [x for x in FORMULAS if x.states == tuple(sorted(kinds)) and (x.fit is _lamb) is norms]
        summed = any(form.kind == "square" and form.keep == 1 for form in sampler.forms)
        fits = ((formula, formula.fit(formula, sampler)) for formula in tried if formula.summed is summed)
        formula, fit = next((pair for pair in fits if pair[1] is not None), (None, None))
        if formula is None or fit is None or not (norms or np.allclose(sampler.few, sampler.truth[:, ::2], _EXACT, 0)):
            return None
    shares = {name: sampler.of[kind].keep for name, kind in formula.keeps.items()}
    roles, up = {**_ROLES, **formula.roles}, fit.size < 0
    return replace(
        fit, kind=formula.name, size=abs(fit.size), flipped=up, hyper={**shares, **formula.facts, **fit.hyper},
        roles=fit.roles or tuple(roles[kind] for kind in kinds),
        direct=-fit.direct if up and formula.name == "NAdam" else fit.direct,
    )  # fmt: skip
