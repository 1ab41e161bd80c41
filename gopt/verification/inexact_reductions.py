"""How far the gradients that ranks combine are from those of one large batch, where their rule is not exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gopt.analysis.coupling import unfit_reductions
from gopt.verification.compare import Values
from gopt.verification.reference_step import Batches, ReferenceProgram
from gopt.verification.variants import PLAIN


def inexact_reductions(reference: ReferenceProgram, states: Values, settings: Values, batches: Batches) -> list[str]:
    """One line for the gradients of each kind that the ranks do not combine as one large batch would, with the size of
    the difference on these batches."""
    training = reference.training
    found = []
    for exact, names, what in unfit_reductions(training, reference.reduction):
        if exact.value and reference.shared.points:
            continue  # counts are taken over all ranks
        asked, other = (
            each.means(each.local(PLAIN, states, settings, batches))
            for each in (reference, reference.combined_by(exact))
        )
        gradients = [training.gradients[name] for name in names]
        found.append(
            f"not the step of one large batch: {what}: {_apart(asked, other, gradients):.2g} off on these batches"
        )
    return found


def _apart(asked: Values, exact: Values, names: Sequence[str]) -> float:
    """The relative distance of some gradients, taken together."""
    wide = [(asked[name].astype(np.float64), exact[name].astype(np.float64)) for name in names]
    with np.errstate(all="ignore"):
        length = float(np.sqrt(sum(float(np.square(right).sum()) for _, right in wide)))
        return float(np.sqrt(sum(float(np.square(left - right).sum()) for left, right in wide))) / (length or 1.0)
