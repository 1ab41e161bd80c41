"""The distance of the gradients combined by ranks from one large batch's gradients, for inexact rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gopt.analysis.coupling import unfit_reductions
from gopt.verification.compare import Values
from gopt.verification.large_batch import LargeBatch, LargeBatchCheck
from gopt.verification.reference_step import Batches, ReferenceProgram
from gopt.verification.variants import PLAIN


def inexact_reductions(
    reference: ReferenceProgram, states: Values, settings: Values, batches: Batches, joined: LargeBatchCheck | None
) -> list[str]:
    """One line for the gradients of each kind that ranks do not combine as one large batch would, with the size of the
    difference on these batches; ``joined``: the comparison of all states, which may be equal on its batches."""
    training = reference.training
    lines = []
    which, where = "not the step of one large batch", "on these batches"
    if joined is not None and joined.outcome is LargeBatch.EQUAL:
        which, where = f"{which} on every batch", "on batches with labels to ignore" if joined.why else where
    for exact, names, what in unfit_reductions(training, reference.reduction):
        if exact.value and reference.shared.points:
            continue  # counts are taken over all ranks
        combined, exact_means = (
            variant.means(variant.local(PLAIN, states, settings, batches))
            for variant in (reference, reference.combined_by(exact))
        )
        gradients = [training.gradients[name] for name in names]
        lines.append(f"{which}: {what}: {_apart(combined, exact_means, gradients):.2g} off {where}")
    return lines


def _apart(combined: Values, exact: Values, names: Sequence[str]) -> float:
    """The relative distance of some gradients, taken together."""
    wide = [(combined[name].astype(np.float64), exact[name].astype(np.float64)) for name in names]
    with np.errstate(all="ignore"):
        length = float(np.sqrt(sum(float(np.square(wanted).sum()) for _, wanted in wide)))
        return float(np.sqrt(sum(float(np.square(mine - right).sum()) for mine, right in wide))) / (length or 1.0)
