"""The document of ``gopt verify --json`` as the report page reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL, key

REFUTED = "refuted"


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """A comparison. ``error``: in tolerances; None where it is not finite."""

    name: str
    kind: str = field(default="", metadata=OPTIONAL)
    rank: int | None = field(default=None, metadata=OPTIONAL)
    step: int | None = field(default=None, metadata=OPTIONAL)
    error: float | None = field(default=None, metadata={**key("error_over_tolerance"), **OPTIONAL})

    def relative_error(self, tolerance: float) -> float | None:
        """The relative error; None where it is not finite."""
        return self.error * tolerance if self.error is not None and math.isfinite(self.error) else None


@dataclass(frozen=True, slots=True)
class CheckedGradient:
    """The check of one parameter's gradient. Documents before there were verdicts say ``holds`` alone."""

    parameter: str
    gradient: str
    holds: bool
    verdict: str = field(default=REFUTED, metadata=OPTIONAL)

    @property
    def refuted(self) -> bool:
        return not self.holds and self.verdict == REFUTED


@dataclass(frozen=True, slots=True)
class UnconfirmedValue:
    """A value that was neither shown equal nor shown different, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class LargeBatchLine:
    """The comparison with the step of one large batch, as it was printed."""

    line: str


@dataclass(frozen=True, slots=True)
class VerificationRecord:
    """The keys of a verification that the page shows. ``worst``: variant -> the value that is furthest off."""

    outcome: str
    tolerance: float
    steps: int
    ranks: int
    compared: int
    worst: Mapping[str, ComparedValue]
    gradients: tuple[CheckedGradient, ...]
    unconfirmed: tuple[UnconfirmedValue, ...]
    notes: tuple[str, ...]
    large_batch: LargeBatchLine | None = field(default=None, metadata=OPTIONAL)
