"""The rules of the optimizers by the states they keep.

A rule is believed only when its formula gives the new parameter at random points too, and it is the same rule in every
trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gopt.offline.optimizer import adam_rules, rms_rules, sgd_rules
from gopt.offline.optimizer.fits import Fit
from gopt.offline.optimizer.probe_harness import Scalars
from gopt.offline.optimizer.sampler import Form, Sampler, find_forms
from gopt.offline.optimizer.update_function import UpdateFunction


def fit_update(update_fn: UpdateFunction, scalars: Scalars, names: Sequence[str]) -> Fit | None:
    """The rule of these values (gradient, parameter, then states) that reproduces the update, or None."""
    with np.errstate(all="ignore"):
        sampler = Sampler(update_fn, scalars, names)
        if not sampler.usable:
            return None
        forms = find_forms(sampler)
        # Moments may come in any order.
        rules = _RULES.get(tuple(sorted(form.kind for form in forms)), ())
        fits = (rule(sampler, forms) for rule in rules)
        return next((found for found in fits if found is not None), None)


_RULES: Mapping[tuple[str, ...], Sequence[Callable[[Sampler, Sequence[Form]], Fit | None]]] = {
    (): (sgd_rules.sgd,),
    ("mean",): (sgd_rules.momentum, sgd_rules.lion, sgd_rules.asgd),
    ("square",): (rms_rules.scaled,),
    ("mean", "square"): (adam_rules.adam, adam_rules.lamb, adam_rules.unrectified, rms_rules.scaled),
    ("maximum", "mean", "square"): (adam_rules.adam,),
    ("mean", "peak"): (adam_rules.adamax,),
    ("other", "square"): (rms_rules.with_momentum, rms_rules.adadelta),
    ("mean", "other", "square"): (rms_rules.with_momentum,),
    ("other", "other"): (sgd_rules.rprop,),
}
