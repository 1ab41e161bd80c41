"""Finds where a step couples the samples of a batch, so that sharding it differs from the step of one large batch."""

from __future__ import annotations

from gopt.analysis.coupling.marks import Coupling, CouplingKind
from gopt.analysis.coupling.step_couplings import (
    COUPLINGS,
    analyse_couplings,
    couplings_as_run,
    find_couplings,
    notes,
    of_kind,
    refuse_other_sums,
    refuse_unlike,
    settled_reduction,
    unfit_reductions,
    without_advice,
)

__all__ = [
    "COUPLINGS", "Coupling", "CouplingKind", "analyse_couplings", "couplings_as_run", "find_couplings", "notes",
    "of_kind", "refuse_other_sums", "refuse_unlike", "settled_reduction", "unfit_reductions", "without_advice",
]  # fmt: skip
