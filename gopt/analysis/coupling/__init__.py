"""Where the samples of a batch are coupled, so that a sharded step is not the step of one large batch."""

from __future__ import annotations

from gopt.analysis.coupling.facts import find_couplings, notes, open_couplings, read_couplings
from gopt.analysis.coupling.marks import Coupled, Coupling

__all__ = ["Coupled", "Coupling", "find_couplings", "notes", "open_couplings", "read_couplings"]
