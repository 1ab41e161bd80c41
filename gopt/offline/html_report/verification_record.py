"""The document of ``gopt verify --json`` as the report page reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from gopt.documents.records import NULLABLE, OPTIONAL, Amount, Count, Open, key, one_of

FORMAT = "gopt-verification/1"
REFUTED = "refuted"


@dataclass(frozen=True, slots=True)
class ComparedValue(Open):
    """A comparison."""

    name: str
    """The name is the value's."""
    kind: str = field(default="", metadata=OPTIONAL)
    """The kind is the kind of a state, or what else was compared."""
    variant: str = field(default="", metadata=OPTIONAL)
    """The variant is the name of the run."""
    rank: int | None = field(default=None, metadata=NULLABLE)
    """The value belongs to this rank."""
    step: int | None = field(default=None, metadata=NULLABLE)
    """The value belongs to this step."""
    error: float | None = field(default=None, metadata={**key("error_over_tolerance"), **NULLABLE})
    """The error is the relative error over the tolerance; null stands for one that is not finite."""

    def relative_error(self, tolerance: float) -> float | None:
        """The relative error; None where it is not finite."""
        return self.error * tolerance if self.error is not None and math.isfinite(self.error) else None


@dataclass(frozen=True, slots=True)
class CheckedGradient(Open):
    """The check of one parameter's gradient. Documents before there were verdicts say ``holds`` alone."""

    parameter: str
    """The parameter is named as in the source."""
    gradient: str
    """The gradient is the value that was taken for its gradient."""
    holds: bool
    """The value is true where the gradient is confirmed."""
    verdict: str = field(default=REFUTED, metadata=OPTIONAL)
    """The verdict is `confirmed`, `refuted`, or a word for neither."""
    ratios: tuple[float | None, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the change of the loss over the change that the gradient promises; null stands for a ratio that is
    not finite."""
    why: str = field(default="", metadata=OPTIONAL)
    """The text says why."""

    @property
    def refuted(self) -> bool:
        return not self.holds and self.verdict == REFUTED


@dataclass(frozen=True, slots=True)
class UnconfirmedValue(Open):
    """A value that was neither shown equal nor shown different, and why."""

    name: str
    """The name is the value's."""
    why: str
    """The text says why."""


@dataclass(frozen=True, slots=True)
class LargeBatchLine(Open):
    """The comparison with the step of one large batch, as it was printed."""

    line: str
    """The line is the outcome as it is printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRecord(Open):
    """A result has what `gopt verify --json` found, which `gopt report --verification FILE` reads."""

    format: str = FORMAT
    """The format is the name and version of this format."""
    equal: bool = field(default=False, metadata=OPTIONAL)
    """The value is true where everything is within tolerance, and everything is confirmed."""
    outcome: Annotated[str, one_of("equal", "different", "unconfirmed")]
    """The outcome is the verdict."""
    tolerance: Amount
    """The tolerance is the largest relative error that counts as equal."""
    steps: Count
    """The ranks ran this many steps."""
    ranks: Count
    """The source was compared with this many ranks."""
    compared: Count
    """The verification made this many comparisons."""
    worst: Mapping[str, ComparedValue]
    """The table has for each variant of the run the value that is furthest off."""
    gradients: tuple[CheckedGradient, ...]
    """The list has what finite differences say of each gradient."""
    unconfirmed: tuple[UnconfirmedValue, ...]
    """The list has what was neither shown equal nor shown different."""
    noise: tuple[str, ...] = field(default=(), metadata=OPTIONAL)
    """The list has the states whose gradient is rounding noise."""
    notes: tuple[str, ...]
    """The list has what a reader should know."""
    large_batch: LargeBatchLine | None = field(default=None, metadata=NULLABLE)
    """The comparison is of the step with one batch of all samples; it is null where none was made."""
