"""Verdicts on a value that is used as a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """REFUTED: the value is not a gradient. UNCONFIRMED: the drawn values cannot tell."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    UNCONFIRMED = "unconfirmed"


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Result of the check of one parameter's gradient.

    ``ratios``: ⟨g, d⟩ over the finite difference, one for each measured direction. ``why``: one line, about the value
    ``gradient``."""

    parameter: str
    gradient: str
    ratios: tuple[float, ...]
    verdict: Verdict
    why: str
    stops: tuple[str, ...] = ()
    """Readings that it takes for constants, where it is not the whole derivative."""

    @property
    def holds(self) -> bool:
        return self.verdict is Verdict.CONFIRMED

    def to_json(self) -> dict[str, Any]:
        return {
            "parameter": self.parameter, "gradient": self.gradient, "ratios": list(self.ratios), "holds": self.holds,
            "verdict": self.verdict.value, "why": self.why,
        }  # fmt: skip


PROPORTIONAL = "proportional to the change of the loss"
ZERO = "zero within rounding: the loss does not depend on it"
ADDITIVE = "a sum over samples, as the gradient is: its mean over ranks is the value of all their samples"
APART_FROM_SHOWN = (
    "a sum over samples, which the shown loss is not: its mean over ranks is the value of all their samples"
)
COUNTED = "a sum over samples, divided by a count of its batch: the loss that is shown divides by none, or by another"
SLICES = "each of its slices is proportional to the change of the loss"
NOT_FINITE = "not a number on the batches drawn"
EQUAL = "equal on all batches drawn: nothing was compared"
SILENT = "zero on all batches drawn, and so is the change of the loss: nothing was compared"
FAINT = "too small against the rounding of the loss to be measured"
UNREAD = "the loss does not read the parameter, and no value made of the states alone has this gradient"
APART = "no difference quotient of the loss agrees with it"
WRONG = "not proportional to the change of the loss"
NOT_ADDITIVE = "not a sum over samples, as a gradient of this loss is"
REPLACEMENT = "the parameter's own new value, not its gradient"
FLAT = "the loss does not depend on the parameter, and yet the value is not zero"
UNSEEN = "not looked at alone: with others not proportional to the change of the loss, where the value of {!r} is wrong"
UNSTEADY = "the loss is not the same twice: a random node draws other numbers each time"
BENT = "a sum of what {!r} makes of single derivatives, as noted: not the gradient of the loss"
MIXED = "terms that are reduced differently are added in it, as noted: not the gradient of the loss"
UNSHOWN = "divided by a count of {!r}, which no loss that is shown reads: show the loss that it is the gradient of"
SHIFTED = "the gradient at a point that every rank moves to by its own batch: not the step of one large batch"
ALONG = "proportional to the change of the loss along {!r}, which is made of the states alone"
IMAGE = "linear in {!r}, which is proportional to the change of the loss, and in nothing else of the batch"
NOT_LINEAR = "a function of {!r}, which is proportional to the change of the loss, but not a linear one"
STOPPED = "proportional to the change of the loss with constants in it: {}"
