"""The fits of one update in all trials, and the constants that they agree on for an assumed bias correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.offline.optimizer.fits import ABOUT, Fit, Hyper
from gopt.offline.optimizer.probe_harness import ProbeHarness, Scalars
from gopt.offline.optimizer.sampler import close
from gopt.offline.optimizer.update_function import UpdateFunction

_ROOTLESS = ("SGD", "momentum", "Lion", "Rprop", "ASGD")


@dataclass(frozen=True, slots=True)
class Rule:
    """A recognised update: its name, its constants (None: not found), what each state is, its step size."""

    name: str
    hyper: dict[str, Hyper] = field(default_factory=dict)
    roles: tuple[str, ...] = ()
    step_size: str = ""
    """The scalar of the graph that is the learning rate after schedule; '' when none is."""
    recognised: bool = True
    flipped: bool = False
    """It goes up the gradient that it is given."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A bias correction: what each trial divides its moments by; ``late``: epsilon joins the uncorrected root;
    ``factor``: what else the step is multiplied by."""

    made: bool
    first: Sequence[float]
    second: Sequence[float]
    late: bool = False
    factor: Sequence[float] = ()

    def gain(self, trial: int) -> float:
        """By how much the uncorrected direction, epsilon apart, is too small."""
        gain = self.first[trial] / float(np.sqrt(self.second[trial]))
        return gain / self.factor[trial] if self.factor else gain

    def size(self, trial: int, fit: Fit) -> float:
        return fit.size if fit.trust else fit.size * self.gain(trial)

    def eps(self, trial: int, fit: Fit) -> float:
        second = 1.0 if self.late else self.second[trial]
        return fit.eps / second if fit.inside else fit.eps / float(np.sqrt(second))


class Evidence:
    """The fits of one update, and the scalars of the graph that may have entered them."""

    def __init__(
        self, harness: ProbeHarness, runs: Sequence[Scalars], update_fn: UpdateFunction, fits: Sequence[Fit]
    ) -> None:
        self.harness, self.runs, self.fits = harness, runs, fits
        seen = {x for node in update_fn.nodes for name in node.inputs for x in harness.inputs_behind(name)}
        self.inputs = [name for name in harness.inputs if name in seen]
        before = (x for node in update_fn.nodes for x in harness.scalars_before(node.inputs))
        self.sources = sorted(
            dict.fromkeys([*self.inputs, *before]),
            key=lambda name: (name not in harness.hyper, name not in harness.inputs),
        )
        """Candidates for the step size: hyper-parameters first, inputs before computed values."""

    def corrections(self) -> list[Correction]:
        """Return candidate divisors of the moments: none, or 1 - beta^t for each scalar t that the update reads."""
        ones = [1.0] * len(self.fits)
        found = [Correction(False, ones, ones)]
        for name in self.inputs if self.fits[0].first else ():
            for later in (0.0, 1.0):
                first, second = [], []
                for fit, scalars in zip(self.fits, self.runs):
                    t = (scalars.number(name) or 0.0) + later
                    first.append(1 - stored(fit.first) ** t)
                    second.append(1 - stored(fit.second) ** t if fit.second else 1.0)
                if all(value > 0 for value in (*first, *second)):
                    found += [Correction(True, first, second), Correction(True, first, second, late=True)]
        return found

    def rule(self, correction: Correction) -> tuple[Rule, int]:
        """The rule under one hypothesis, and how much of the update it explains."""
        fits, late = self.fits, len(self.fits) - 1
        sizes = [correction.size(place, fit) for place, fit in enumerate(fits)]
        source, score = self.source(sizes)
        kind, hyper = fits[late].kind, {key: agreed([f.hyper[key] for f in fits]) for key in fits[0].hyper}
        if kind not in _ROOTLESS:
            rooted = [(place, fit) for place, fit in enumerate(fits) if fit.kind == kind]
            hyper["eps"] = agreed([correction.eps(place, fit) for place, fit in rooted])
            score += 4 if hyper["eps"] is not None else 0
            if fits[late].inside and kind != "Adadelta":  # Adadelta has its epsilon in no other place
                hyper["eps_inside_root"] = True
        if kind == "Rprop":
            return Rule(kind, hyper, fits[late].roles, flipped=fits[late].flipped), 0
        decay, coupled = self.decay(sizes, correction, bool(source))
        score += 1 if decay is not None else 0
        hyper["weight_decay"] = decay
        if decay and kind != "SGD":
            hyper["decoupled"] = not coupled
        if fits[0].first:
            hyper["bias_correction"] = correction.made if source else None
        if kind == "Adam" and decay and not coupled:
            kind = "AdamW"
        flipped = fits[late].flipped
        return Rule(kind, hyper, fits[0].roles, source, flipped=flipped), 2 * score + (correction.made and bool(source))

    def source(self, sizes: Sequence[float]) -> tuple[str, int]:
        """The scalar that equals the step size in every trial, and how much evidence that is."""
        if not any(sizes):
            return "", 0
        for name in self.sources:
            values = [scalars.number(name) for scalars in self.runs]
            if all(close(None if value is None else abs(value), size) for value, size in zip(values, sizes)):
                return name, 3 if name in self.harness.hyper else 2 if self.harness.is_constant(name) else 1
        return "", 0

    def is_(self, name: str, values: Sequence[float]) -> bool:
        """Return whether a scalar has these values in the trials."""
        return all(close(run.number(name), value) for run, value in zip(self.runs, values))

    def decay(self, sizes: Sequence[float], correction: Correction, found: bool) -> tuple[Hyper, bool]:
        """Weight decay and whether it is coupled (added to the gradient); ``found``: the step size is known."""
        fits = self.fits
        if fits[0].trust:
            return agreed([fit.pull / correction.gain(place) for place, fit in enumerate(fits)]), False
        coupled = [fit.coupled for fit in fits]
        lost = [1 - fit.kept for fit in fits]
        if any(not abs(value) <= 1e-12 for value in coupled):
            return (agreed(coupled), True) if all(abs(value) < 1e-12 for value in lost) else (None, True)
        if all(abs(value) < 1e-12 for value in lost):
            return 0.0, False
        return (agreed([value / size for value, size in zip(lost, sizes)]), False) if found else (None, False)


def stored(beta: float) -> float:
    """0.1f in place of 1 - 0.9f makes a beta differ in the eighth digit from the 0.9f that a power is taken of."""
    return float(np.float32(tidy(beta)))


def tidy(value: float) -> float:
    """The number rounded to six significant digits, where that is the same number."""
    short = float(f"{value:.6g}")
    shorter = float(f"{value:.3g}")
    return shorter if abs(shorter - value) <= 2e-6 * abs(value) else short


def agreed(values: Sequence[float | bool | None]) -> Hyper:
    """The one value of all trials, or None."""
    first = values[0]
    if first is None or isinstance(first, bool):
        return first if all(value == first for value in values) else None
    if any(value is None or not np.isfinite(value) or not close(value, first, ABOUT) for value in values):
        return None
    return tidy(float(first))
