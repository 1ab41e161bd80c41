"""Rules whose steps follow the count of steps by a formula of their own: RAdam, NAdam, ASGD.

Each is believed only when the formula, with one set of constants, gives the coefficients of every trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gopt.offline.optimizer.evidence import Correction, Evidence, Rule, agreed, stored, tidy
from gopt.offline.optimizer.fits import Hyper
from gopt.offline.optimizer.probe_harness import Scalars, spread
from gopt.offline.optimizer.sampler import close

_SOON = 100.0
"""A step up to which what decays with the count of steps has not vanished."""


def rectified(evidence: Evidence) -> Rule | None:
    """RAdam: Adam's step times a factor where the second moment has been gathered long enough, else none of it."""
    for counts in _counts(evidence):
        for most in _lengths(evidence.fits[0].second):
            corrections = _rectifications(evidence, counts, most)
            if corrections is None:
                continue
            rule = max((evidence.rule(each) for each in corrections), key=lambda found: found[1])[0]
            if rule.step_size:
                return replace(rule, name="RAdam", hyper=_without_correction(rule))
    return None


def _lengths(beta: float) -> list[float]:
    """The longest average, of beta as it was written, and as it was stored: the difference counts at early steps."""
    return [2 / (1 - each) - 1 for each in (tidy(beta), stored(beta))]


def _rectifications(evidence: Evidence, counts: list[float], most: float) -> list[Correction] | None:
    """Adam's correction and the factor of each trial, for both places of epsilon."""
    first, second, factor = [], [], []
    for t, fit in zip(counts, evidence.fits):
        rooted, root = fit.kind == "Adam", 1 - stored(fit.second) ** t
        length = most - 2 * t * (1 - root) / root
        square = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
        if rooted and not square > 0:
            return None
        first.append(1 - stored(fit.first) ** t)
        second.append(root if rooted else 1.0)
        factor.append(float(np.sqrt(square)) if rooted else 1.0)
    return [Correction(True, first, second, late, factor) for late in (False, True)]


def _without_correction(rule: Rule) -> dict[str, Hyper]:
    """The constants, less one that is not a choice of this rule."""
    return {key: value for key, value in rule.hyper.items() if key != "bias_correction"}


def with_nesterov(evidence: Evidence) -> Rule | None:
    """NAdam: the gradient has a part of its own in the step, with a momentum that grows with the count of steps."""
    for counts in _counts(evidence):
        second = [1 - stored(fit.second) ** t for t, fit in zip(counts, evidence.fits)]
        for name in evidence.sources:
            rates = [abs(value) if (value := run.number(name)) else np.nan for run in evidence.runs]
            if not np.isfinite(rates).all():
                continue
            for product in evidence.inputs:
                decay = _momentum_decay(evidence, counts, second, rates, product)
                if decay is not None:
                    ones = [1.0] * len(rates)
                    # What the rate is multiplied by is explained: divide it out, so that the rest can be settled.
                    factor = [fit.size / rate * root for fit, rate, root in
                              zip(evidence.fits, rates, 1 / np.sqrt(second))]  # fmt: skip
                    rule = evidence.rule(Correction(True, ones, second, False, factor))[0]
                    return replace(rule, hyper=_without_correction(rule) | {"momentum_decay": decay})
    return None


def _momentum_decay(
    evidence: Evidence, counts: list[float], second: list[float], rates: list[float], product: str
) -> float | None:
    """The constant by which the momentum grows, if with it the coefficients are those of NAdam."""
    fits, found = evidence.fits, []
    beta = stored(fits[0].first)
    before = [run.number(product) or 0.0 for run in evidence.runs]
    with np.errstate(all="ignore"):
        for t, fit, root, rate, p in zip(counts, fits, np.sqrt(second), rates, before):
            share = fit.direct / root / rate
            momentum = (1 - share) / (1 - share * p)
            if t < _SOON:
                found.append(float(np.log(2 * (1 - momentum / beta)) / (t * np.log(0.96))))
        if not found or not all(close(each, found[0], 1e-3) for each in found) or not found[0] > 0:
            return None
        decay = tidy(float(np.median(found)))
        for t, fit, root, rate, p in zip(counts, fits, np.sqrt(second), rates, before):
            now, later = (beta * (1 - 0.5 * 0.96 ** (step * decay)) for step in (t, t + 1))
            direct, moment = rate * (1 - now) / (1 - p * now), rate * later / (1 - p * now * later)
            if not close(fit.direct / root, direct, 1e-5) or not close(fit.size / root, moment, 1e-5):
                return None
    return decay


def averaged(evidence: Evidence) -> Rule | None:
    """ASGD: a rate that is a state, lr / (1 + lambd lr t)^alpha, and an average that begins after t0 steps."""
    updated = evidence.harness.updated
    sizes, shares = ([getattr(fit, key) for fit in evidence.fits] for key in ("size", "share"))
    rate = next((x for x in evidence.inputs if x in updated and evidence.is_(x, sizes)), "")
    share = next((x for x in evidence.inputs if x in updated and evidence.is_(x, shares)), "")
    if not rate or not share:
        return None
    made = _rate_of(evidence, updated[rate])
    begins = _begins(evidence, updated[share])
    if made is None or begins is None:
        return None
    source, hyper = made
    lost = agreed([(1 - fit.kept) / fit.size for fit in evidence.fits])
    lambd = hyper["lambd"]
    if not lost or not lambd or lost < lambd * (1 - 1e-3):
        return None
    rest = tidy(lost - lambd) if lost - lambd > 1e-3 * lost else 0.0
    return Rule(
        "ASGD", hyper | {"t0": begins, "weight_decay": rest}, evidence.fits[0].roles, source,
        flipped=evidence.fits[0].flipped,
    )  # fmt: skip


def decaying(evidence: Evidence, rule: Rule) -> Rule:
    """Adagrad with the rate lr / (1 + (t - 1) lr_decay), as opposed to a constant rate."""
    sizes = [fit.size for fit in evidence.fits]
    if rule.step_size and rule.step_size in evidence.harness.hyper:
        return rule
    for counts in _counts(evidence):
        for name in evidence.sources:
            rates = [abs(run.number(name) or np.nan) for run in evidence.runs]
            with np.errstate(all="ignore"):
                found = [(rate / size - 1) / (t - 1) for rate, size, t in zip(rates, sizes, counts) if t > 1]
            decay = agreed(found) if len(found) > 1 else None
            if decay and not any(t == 1 and not close(rate, size) for rate, size, t in zip(rates, sizes, counts)):
                return replace(rule, hyper=rule.hyper | {"lr_decay": decay}, step_size=name)
    return rule


def _rate_of(evidence: Evidence, updated: str) -> tuple[str, dict[str, Hyper]] | None:
    """The learning rate behind a decaying one, with lambd and alpha."""
    harness = evidence.harness

    def at(count: float, seed: int, **given: float) -> Scalars:
        return Scalars(harness, spread(harness.inputs, seed) | dict.fromkeys(harness.counters, count) | given)

    for source in harness.scalars_before([updated]):
        found = []
        for seed in range(3):
            runs = [at(count, seed) for count in (1e12, 1e18, 50.0)]
            rates = [run.number(updated) or np.nan for run in runs]
            lr = runs[0].number(source) or np.nan
            with np.errstate(all="ignore"):
                alpha = float(np.log(rates[0] / rates[1]) / np.log(1e6))
                lambd = float(((lr / rates[1]) ** (1 / alpha) - 1) / (lr * 1e18))
                again = [lr / (1 + lambd * lr * count) ** alpha for count in (1e12, 1e18, 51.0)]
            if not all(close(*pair, 1e-5) for pair in zip(rates, again)):
                break
            found.append((alpha, lambd))
        exponent, factor = (agreed([each[k] for each in found] or [None]) for k in (0, 1))
        if len(found) == 3 and exponent is not None and factor is not None:
            return source, {"lambd": factor, "alpha": exponent}
    return None


def _begins(evidence: Evidence, updated: str) -> float | None:
    """t0, where the share of the new parameter in the average becomes 1 / (t - t0)."""
    harness = evidence.harness
    for count in (1e3, 1e6, 1e9, 1e12):
        run = Scalars(harness, spread(harness.inputs, 0) | dict.fromkeys(harness.counters, count))
        value = run.number(updated)
        if value is None or not 0 < value <= 1:
            return None
        if value < 1:
            return tidy(round(count + 1 - 1 / value, 3))
    return None


def _counts(evidence: Evidence) -> Iterator[list[float]]:
    """For each scalar that may count steps: its value in every trial, or that plus one."""
    for name in evidence.inputs:
        for later in (0.0, 1.0):
            counts = [(run.number(name) or 0.0) + later for run in evidence.runs]
            if all(count > 0 for count in counts):
                yield counts
