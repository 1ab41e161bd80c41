"""The constants on which the fits of all trials agree: a number equal in every trial is a hyper-parameter.

Steps that follow the count of steps (bias corrections, RAdam, NAdam, ASGD, decays of Adagrad) agree under a hypothesis,
a ``Correction``; the best explanation is believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from gopt.offline.optimizer.formulas import ABOUT, Fit, Hyper, close
from gopt.offline.optimizer.probe import Array, Probe, Scalars, UpdateFunction

_ROOTLESS = ("SGD", "momentum", "Lion", "Rprop")
_CORRECTED = ("Adam", "NAdam", "Adamax", "LAMB", "unrectified")
_SOON = 100.0
"""A step up to which what decays with the count of steps has not vanished."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A recognised update: the name, the constants (None: not found), the role of each state, the step size.

    ``step_size``: the scalar of the graph for the learning rate after schedule, or ''. ``flipped``: the rule goes up
    the gradient."""

    name: str
    hyper: dict[str, Hyper] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    step_size: str = ""
    recognised: bool = True
    flipped: bool = False


@dataclass(frozen=True, slots=True)
class Correction:
    """A hypothesis: each trial's divisor of the moments; ``late``: epsilon joins the uncorrected root; ``factor``: a
    further factor of the step. ``name`` and ``hyper``: of a rule known by its correction."""

    made: bool = True
    first: Array | float = 1.0
    second: Array | float = 1.0
    late: bool = False
    factor: Array | float = 1.0
    name: str = ""
    hyper: dict[str, Hyper] = field(default_factory=dict)

    @property
    def gain(self) -> Array:
        """By how much the uncorrected direction, epsilon apart, is too small."""
        return np.asarray(self.first / np.sqrt(self.second) / self.factor)


class Evidence:
    """The fits of one update, and the scalars of the graph that may be part of them."""

    def __init__(self, probe: Probe, runs: Sequence[Scalars], update_fn: UpdateFunction, fits: Sequence[Fit]) -> None:
        self.probe, self.runs, self.fits = probe, runs, fits
        self.kind = fits[-1].kind
        hyper = fits[0].hyper if self.kind in _CORRECTED else {}
        self.first = stored(float(hyper.get("beta1") or 0))
        self.second = stored(float(hyper.get("beta2") or 0)) if self.kind != "Adamax" else 0.0
        """Betas that a bias correction may follow; 0 without such a beta."""
        used = {x for node in update_fn.nodes for name in node.inputs for x in probe.inputs_behind(name)}
        self.inputs = [name for name in probe.inputs if name in used]
        before = (x for node in update_fn.nodes for x in probe.scalars_before(node.inputs))
        self.sources = sorted(
            dict.fromkeys([*self.inputs, *before]),
            key=lambda name: (name not in probe.hyper, name not in probe.inputs),
        )
        """Candidates for the step size: hyper-parameters first, inputs before computed values."""

    def of(self, key: str) -> Array:
        """A coefficient in all trials."""
        return np.array([getattr(fit, key) for fit in self.fits], np.float64)

    def values(self, name: str) -> Array:
        """A scalar's values in all trials; NaN where absent."""
        return np.array([run.number(name) for run in self.runs])

    def counts(self) -> Iterator[Array]:
        """For each possible step counter: the value in every trial, or the value plus one."""
        for name in self.inputs:
            for counts in (self.values(name), self.values(name) + 1):
                if (counts > 0).all():
                    yield counts

    def rule(self, correction: Correction) -> tuple[Rule, int]:
        """The rule under one hypothesis, and the explained share of the update."""
        last = self.fits[-1]
        kind, hyper = last.kind, {key: agreed([fit.hyper[key] for fit in self.fits]) for key in last.hyper}
        sizes = self.of("size") * (1.0 if kind == "LAMB" else correction.gain)
        source, score = self._source(sizes)
        if kind not in _ROOTLESS:
            below = 1.0 if correction.late else correction.second
            eps = self.of("eps") / (below if last.inside else np.sqrt(below))
            hyper["eps"] = agreed([epsilon for epsilon, fit in zip(eps, self.fits) if fit.kind == kind])
            score += 4 if hyper["eps"] is not None else 0
            if last.inside and kind != "Adadelta":  # Adadelta has its epsilon in no other place
                hyper["eps_inside_root"] = True
        if kind == "Rprop":
            return Rule(kind, hyper, last.roles, flipped=last.flipped), 0
        decay, coupled = self._decay(sizes, correction, bool(source))
        hyper["weight_decay"] = decay
        if decay and kind != "SGD":
            hyper["decoupled"] = not coupled
        if self.first and not correction.name:
            hyper["bias_correction"] = correction.made if source else None
        if kind == "Adam" and decay and not coupled:
            kind = "AdamW"
        score = 2 * (score + (decay is not None)) + (correction.made and bool(source))
        return Rule(correction.name or kind, hyper | correction.hyper, last.roles, source, flipped=last.flipped), score

    def _source(self, sizes: Array) -> tuple[str, int]:
        """The scalar equal to the step size in every trial, and the weight of this evidence."""
        for name in self.sources if sizes.any() else ():
            if alike(np.abs(self.values(name)), sizes, 1e-5):  # a rectification loses digits at early steps
                return name, 3 if name in self.probe.hyper else 2 if self.probe.is_constant(name) else 1
        return "", 0

    def _decay(self, sizes: Array, correction: Correction, known_size: bool) -> tuple[Hyper, bool]:
        """Weight decay and whether it is coupled (added to the gradient); ``known_size``: the step size is known."""
        if self.kind == "LAMB":
            return agreed(self.of("coupled") / correction.gain), False
        coupled, lost = self.of("coupled"), 1 - self.of("kept")
        if not (np.abs(coupled) <= 1e-12).all():
            return agreed(coupled) if (np.abs(lost) < 1e-12).all() else None, True
        if (np.abs(lost) < 1e-12).all():
            return 0.0, False
        return agreed(lost / sizes) if known_size else None, False


def fit_rule(probe: Probe, runs: Sequence[Scalars], update_fn: UpdateFunction, fits: Sequence[Fit]) -> Rule | None:
    """The common rule of an update's fits, one fit for each trial; None for fits of several rules."""
    kinds, last = {fit.kind for fit in fits}, fits[-1]
    forms = {(fit.roles, fit.flipped, fit.inside) for fit in fits if fit.kind == last.kind}
    kind = "RAdam" if kinds == {"Adam", "unrectified"} else last.kind
    if len(forms) > 1 or (len(kinds) > 1 and kind != "RAdam") or kind == "unrectified":
        return None
    with np.errstate(all="ignore"):
        evidence = Evidence(probe, runs, update_fn, fits)
        if kind == "ASGD":
            return _averaged(evidence)
        ranked = [evidence.rule(correction) for correction in _CORRECTIONS.get(kind, _biases)(evidence)]
    if not ranked:
        return None
    rule = max(ranked, key=lambda pair: pair[1])[0]  # the first of the best
    # A step size that no scalar explains, beside a count of steps: some other function of the count is in it.
    counted = kind in ("RAdam", "NAdam") or any(name in probe.counters for name in evidence.inputs)
    return None if evidence.first and not rule.step_size and counted else rule


def _biases(evidence: Evidence) -> Iterator[Correction]:
    """No division of the moments, or a division by 1 - beta^t, for each scalar t read by the update."""
    yield Correction(made=False)
    for t in evidence.counts() if evidence.first else ():
        mean_share, square_share = 1 - evidence.first**t, 1 - evidence.second**t
        if (mean_share > 0).all() and (square_share > 0).all():
            yield from (Correction(True, mean_share, square_share, late) for late in (False, True))


def _rectifications(evidence: Evidence) -> Iterator[Correction]:
    """RAdam: Adam's step times a factor once the second moment is gathered long enough, else without that moment."""
    rooted = np.array([fit.kind == "Adam" for fit in evidence.fits])
    for t in evidence.counts():
        second = 1 - evidence.second**t
        # The longest average, of beta as it was written, and as it was stored: the difference counts at early steps.
        for most in (2 / (1 - beta) - 1 for beta in (tidy(evidence.second), evidence.second)):
            length = most - 2 * t * (1 - second) / second
            square = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
            if (square > 0)[rooted].all():
                below, factor = np.where(rooted, second, 1.0), np.where(rooted, np.sqrt(square), 1.0)
                for late in (False, True):
                    yield Correction(True, 1 - evidence.first**t, below, late, factor, "RAdam")


def _ahead(evidence: Evidence) -> Iterator[Correction]:
    """NAdam: the gradient has a separate part in the step, with a momentum that grows with the count of steps."""
    corrections: dict[float, Correction] = {}
    # The betas as they were written, and as they were stored: the difference counts at early steps.
    for t, rounding in product(evidence.counts(), (tidy, stored)):
        beta, second = rounding(evidence.first), 1 - rounding(evidence.second) ** t
        late = np.flatnonzero(t < _SOON)[-1:]
        direct, size = (evidence.of(key) / np.sqrt(second) for key in ("direct", "size"))
        for rate in (np.abs(evidence.values(name)) for name in evidence.sources):
            for before in map(evidence.values, evidence.inputs):
                share = direct / rate
                decays = np.log(2 * (1 - (1 - share) / (1 - share * before) / beta)) / (t * np.log(0.96))
                decay = tidy(float(decays[late].sum()))
                now, later = (beta * (1 - 0.5 * 0.96 ** (step * decay)) for step in (t, t + 1))
                this_step, next_step = rate * (1 - now) / (1 - before * now), rate * later / (1 - before * now * later)
                apart = float(np.abs([direct / this_step - 1, size / next_step - 1]).max())
                if decay > 0 and apart < 1e-5:
                    factor, hyper = size / rate, {"momentum_decay": decay}  # explained: the factor is divided out
                    corrections[apart] = Correction(True, 1.0, second, False, factor, "NAdam", dict(hyper))
    yield from (corrections[apart] for apart in sorted(corrections))  # the first of the best is believed


def _decays(evidence: Evidence) -> Iterator[Correction]:
    """Adagrad with a constant rate, or with the rate lr / (1 + (t - 1) lr_decay)."""
    yield Correction(made=False)
    for t in evidence.counts():
        for name in evidence.sources:
            slower, late = np.abs(evidence.values(name)) / evidence.of("size"), t > 1
            decay = agreed((slower - 1)[late] / (t - 1)[late]) if late.sum() > 1 else None
            if decay and alike(slower[~late], np.ones_like(t)[~late]):
                yield Correction(factor=1 / slower, hyper={"lr_decay": decay})


_CORRECTIONS: Mapping[str, Callable[[Evidence], Iterator[Correction]]] = {
    "RAdam": _rectifications, "NAdam": _ahead, "Adagrad": _decays,
}  # fmt: skip


def _averaged(evidence: Evidence) -> Rule | None:
    """ASGD: a rate as a state, lr / (1 + lambd lr t)^alpha, and an average that begins after t0 steps."""
    probe, last = evidence.probe, evidence.fits[-1]
    states = [name for name in evidence.inputs if name in probe.updated]
    size = next((x for x in states if alike(evidence.values(x), evidence.of("size"))), "")
    share = next((x for x in states if alike(evidence.values(x), evidence.of("direct"))), "")
    begins = _begins(probe, probe.updated[share]) if share else None
    source, lambd, alpha = _rate_of(probe, probe.updated[size]) if size else ("", None, None)
    lost = agreed((1 - evidence.of("kept")) / evidence.of("size"))
    if begins is None or not lambd or not lost or lost < lambd * (1 - 1e-3):
        return None
    rest = tidy(lost - lambd) if lost - lambd > 1e-3 * lost else 0.0
    hyper = {"lambd": lambd, "alpha": alpha, "t0": begins, "weight_decay": rest}
    return Rule("ASGD", hyper, last.roles, source, flipped=last.flipped)


def _rate_of(probe: Probe, updated: str) -> tuple[str, Hyper, Hyper]:
    """The learning rate behind a decaying rate, with lambd and alpha."""
    counts = [dict.fromkeys(probe.counters, count) for count in (1e15, 1e18, 50.0)]
    runs = [[probe.scalars(seed, count) for count in counts] for seed in range(3)]
    rates = np.array([[run.number(updated) for run in row] for row in runs])
    alphas = np.log(rates[:, 0] / rates[:, 1]) / np.log(1e3)
    for source in probe.scalars_before([updated]):
        lr = np.array([row[0].number(source) for row in runs])
        lambdas = ((lr / rates[:, 1]) ** (1 / alphas) - 1) / (lr * 1e18)
        again = [lr / (1 + lambdas * lr * count) ** alphas for count in (1e15, 1e18, 51.0)]
        lambd, alpha = agreed(lambdas), agreed(alphas)
        if alike(rates, np.array(again).T, 1e-5) and lambd is not None and alpha is not None:
            return source, lambd, alpha
    return "", None, None


def _begins(probe: Probe, updated: str) -> float | None:
    """t0, where the share of the new parameter in the average becomes 1 / (t - t0)."""
    for count in (1e3, 1e6, 1e9, 1e12):
        value = probe.scalars(0, dict.fromkeys(probe.counters, count)).number(updated)
        if not 0 < value <= 1:
            return None
        if value < 1:
            return tidy(round(count + 1 - 1 / value, 3))
    return None


def stored(beta: float) -> float:
    """0.1f in place of 1 - 0.9f makes a beta differ in the eighth digit from the 0.9f under a power."""
    return float(np.float32(tidy(beta)))


def tidy(value: float) -> float:
    """The number rounded to six significant digits, where equal."""
    short, shorter = float(f"{value:.6g}"), float(f"{value:.3g}")
    return shorter if abs(shorter - value) <= 2e-6 * abs(value) else short


def alike(values: Array, twins: Array, tolerance: float = 1e-6) -> bool:
    """Return whether all numbers are close to their counterparts in ``twins``."""
    return all(map(close, values.flat, twins.flat, [tolerance] * values.size))


def agreed(values: Sequence[float | bool | None] | Array) -> Hyper:
    """The common value of all trials, or None."""
    reference = values[0]
    if reference is None or isinstance(reference, bool):
        return reference if all(value == reference for value in values) else None
    if any(value is None or not np.isfinite(value) or not close(value, reference, ABOUT) for value in values):
        return None
    return tidy(float(reference))
