"""Fit a rule to the coefficients of all trials: a number that is equal in every trial is a hyper-parameter."""

from __future__ import annotations

from collections.abc import Sequence

from gopt.offline.optimizer.evidence import Evidence, Rule
from gopt.offline.optimizer.fits import Fit
from gopt.offline.optimizer.probe_harness import ProbeHarness, Scalars
from gopt.offline.optimizer.step_count_rules import averaged, decaying, rectified, with_nesterov
from gopt.offline.optimizer.update_function import UpdateFunction


def fit_rule(
    harness: ProbeHarness, runs: Sequence[Scalars], update_fn: UpdateFunction, fits: Sequence[Fit]
) -> Rule | None:
    """The rule on which the fits of one update, one for each trial, agree; None where they do not agree.

    Bias correction is what makes them agree: of what the moments may be divided by, the guess that explains most.
    """
    kinds = {fit.kind for fit in fits}
    first = fits[-1]  # of a late step
    if any((fit.roles, fit.flipped, fit.inside) != (first.roles, first.flipped, first.inside)
           for fit in fits if fit.kind == first.kind):  # fmt: skip
        return None
    evidence = Evidence(harness, runs, update_fn, fits)
    if kinds == {"Adam", "unrectified"}:
        return rectified(evidence)
    if len(kinds) > 1 or kinds == {"unrectified"}:
        return None
    if first.kind == "NAdam":
        return with_nesterov(evidence)
    if first.kind == "ASGD":
        return averaged(evidence)
    found = [evidence.rule(correction) for correction in evidence.corrections()]
    rule = max(found, key=lambda each: each[1])[0]  # the first of the best
    # A step size that no scalar explains, beside a count of steps: some other function of the count is in it.
    unexplained = first.first and not rule.step_size and any(name in harness.counters for name in evidence.inputs)
    if unexplained:
        return None
    return decaying(evidence, rule) if rule.name == "Adagrad" else rule
