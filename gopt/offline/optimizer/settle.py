"""From the coefficients of all trials to a rule: a number is a hyper-parameter when it is the same in every trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.offline.optimizer.probe import close
from gopt.offline.optimizer.rules import ABOUT, Fit, Hyper
from gopt.offline.optimizer.trial import Cell, Scalars, Trial


@dataclass(frozen=True, slots=True)
class Rule:
    """A recognised update: its name, its constants (None: not found), what each state is, its step size."""

    name: str
    hyper: Mapping[str, Hyper] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    step_size: str = ""
    """The scalar of the graph that is the learning rate after schedule; '' when none is."""
    recognised: bool = True


def settle(trial: Trial, runs: Sequence[Scalars], cell: Cell, fits: Sequence[Fit]) -> Rule:
    """The rule that the fits of one cell, one for each of the runs, agree on.

    Bias correction is what makes them agree: of what the moments may be divided by, the guess that explains most.
    """
    evidence = _Evidence(trial, runs, cell, fits)
    found = [evidence.rule(correction) for correction in evidence.corrections()]
    return max(found, key=lambda each: each[1])[0]  # the first of the best


@dataclass(frozen=True, slots=True)
class _Correction:
    """A bias correction: what each trial divides its moments by; ``late``: epsilon joins the uncorrected root."""

    made: bool
    first: Sequence[float]
    second: Sequence[float]
    late: bool = False

    def gain(self, trial: int) -> float:
        """By how much the uncorrected direction, epsilon apart, is too small."""
        return self.first[trial] / float(np.sqrt(self.second[trial]))

    def size(self, trial: int, fit: Fit) -> float:
        return fit.size if fit.trust else fit.size * self.gain(trial)

    def eps(self, trial: int, fit: Fit) -> float:
        second = 1.0 if self.late else self.second[trial]
        return fit.eps / second if fit.inside else fit.eps / float(np.sqrt(second))


class _Evidence:
    """The fits of one cell, and the scalars of the graph that may have had a part in them."""

    def __init__(self, trial: Trial, runs: Sequence[Scalars], cell: Cell, fits: Sequence[Fit]) -> None:
        self.trial, self.runs, self.fits = trial, runs, fits
        seen = {x for node in cell.nodes for name in node.inputs for x in trial.inputs_behind(name)}
        self.inputs = [name for name in trial.inputs if name in seen]
        before = (x for node in cell.nodes for x in trial.scalars_before(node.inputs))
        self.sources = sorted(
            dict.fromkeys([*self.inputs, *before]), key=lambda name: (name not in trial.hyper, name not in trial.inputs)
        )
        """What the step size may be: a hyper-parameter first, an input before a computed value."""

    def corrections(self) -> list[_Correction]:
        """What the moments may be divided by: nothing, or 1 - beta^t for each scalar t that the update sees."""
        ones = [1.0] * len(self.fits)
        found = [_Correction(False, ones, ones)]
        for name in self.inputs if self.fits[0].first else ():
            for later in (0.0, 1.0):
                first, second = [], []
                for fit, scalars in zip(self.fits, self.runs):
                    t = (scalars.number(name) or 0.0) + later
                    first.append(1 - _stored(fit.first) ** t)
                    second.append(1 - _stored(fit.second) ** t if fit.second else 1.0)
                if all(value > 0 for value in (*first, *second)):
                    found += [_Correction(True, first, second), _Correction(True, first, second, late=True)]
        return found

    def rule(self, correction: _Correction) -> tuple[Rule, int]:
        """The rule under one hypothesis, and how much of it that explains."""
        fits = self.fits
        sizes = [correction.size(place, fit) for place, fit in enumerate(fits)]
        source, score = self._source(sizes)
        kind, hyper = fits[0].kind, {key: _agreed([f.hyper[key] for f in fits]) for key in fits[0].hyper}
        if kind not in ("SGD", "momentum", "Lion"):
            hyper["eps"] = _agreed([correction.eps(place, fit) for place, fit in enumerate(fits)])
            score += 4 if hyper["eps"] is not None else 0
            if fits[0].inside:
                hyper["eps_inside_root"] = True
        decay, coupled = self._decay(sizes, correction, bool(source))
        score += 1 if decay is not None else 0
        hyper["weight_decay"] = decay
        if decay and kind != "SGD":
            hyper["decoupled"] = not coupled
        if fits[0].first:
            hyper["bias_correction"] = correction.made if source else None
        if kind == "Adam" and decay and not coupled:
            kind = "AdamW"
        return Rule(kind, hyper, fits[0].roles, source), 2 * score + (correction.made and bool(source))

    def _source(self, sizes: Sequence[float]) -> tuple[str, int]:
        """The scalar that is the step size in every trial, and how much that says."""
        for name in self.sources:
            values = [scalars.number(name) for scalars in self.runs]
            if all(close(value, size) for value, size in zip(values, sizes)):
                return name, 3 if name in self.trial.hyper else 2 if self.trial.is_constant(name) else 1
        return "", 0

    def _decay(self, sizes: Sequence[float], correction: _Correction, found: bool) -> tuple[Hyper, bool]:
        """Weight decay and whether it is coupled (added to the gradient); ``found``: the step size is known."""
        fits = self.fits
        if fits[0].trust:
            return _agreed([fit.pull / correction.gain(place) for place, fit in enumerate(fits)]), False
        coupled = [fit.coupled for fit in fits]
        lost = [1 - fit.kept for fit in fits]
        if any(not abs(value) <= 1e-12 for value in coupled):
            return (_agreed(coupled), True) if all(abs(value) < 1e-12 for value in lost) else (None, True)
        if all(abs(value) < 1e-12 for value in lost):
            return 0.0, False
        return (_agreed([value / size for value, size in zip(lost, sizes)]), False) if found else (None, False)


def _stored(beta: float) -> float:
    """0.1f in place of 1 - 0.9f makes a beta differ in the eighth digit from the 0.9f that a power is taken of."""
    return float(np.float32(tidy(beta)))


def tidy(value: float) -> float:
    """The number as it was written: six significant digits where they say the same."""
    short = float(f"{value:.6g}")
    shorter = float(f"{value:.3g}")
    return shorter if abs(shorter - value) <= 2e-6 * abs(value) else short


def _agreed(values: Sequence[float | bool | None]) -> Hyper:
    """The one value of all trials, or None."""
    first = values[0]
    if first is None or isinstance(first, bool):
        return first if all(value == first for value in values) else None
    if any(value is None or not np.isfinite(value) or not close(value, first, ABOUT) for value in values):
        return None
    return tidy(float(first))
