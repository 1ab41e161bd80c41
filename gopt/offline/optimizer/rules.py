"""The rules of the optimizers by the states they keep.

A rule is believed only when its formula gives the new parameter at random points too, and it is the same rule in every
trial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gopt.offline.optimizer import moments, plain, rooted
from gopt.offline.optimizer.cell import Cell
from gopt.offline.optimizer.fits import Fit
from gopt.offline.optimizer.probe import Form, Probe, find_forms
from gopt.offline.optimizer.trial import Scalars


def fit(cell: Cell, scalars: Scalars, names: Sequence[str]) -> Fit | None:
    """The rule of these values (the gradient, the parameter, then its states) that agrees with the cell, or None."""
    with np.errstate(all="ignore"):
        probe = Probe(cell, scalars, names)
        if not probe.usable:
            return None
        forms = find_forms(probe)
        # Moments may come in any order.
        rules = _RULES.get(tuple(sorted(form.kind for form in forms)), ())
        fits = (rule(probe, forms) for rule in rules)
        return next((found for found in fits if found is not None), None)


_RULES: Mapping[tuple[str, ...], Sequence[Callable[[Probe, Sequence[Form]], Fit | None]]] = {
    (): (plain.sgd,),
    ("mean",): (plain.momentum, plain.lion, plain.asgd),
    ("square",): (rooted.scaled,),
    ("mean", "square"): (moments.adam, moments.lamb, moments.unrectified, rooted.scaled),
    ("maximum", "mean", "square"): (moments.adam,),
    ("mean", "peak"): (moments.adamax,),
    ("other", "square"): (rooted.with_momentum, rooted.adadelta),
    ("mean", "other", "square"): (rooted.with_momentum,),
    ("other", "other"): (plain.rprop,),
}
