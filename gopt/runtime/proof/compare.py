"""How close is equal (contract section 7): distances, allowances, and the ledger of one step's comparisons."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gopt.graph.model import Graph
from gopt.runtime.proof.confirm import Confirmation

Values = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a value is off, counted in tolerances.

    ``error_over_tolerance``: the distance over what is allowed, a number without a unit; above 1 is a failure. Times
    ``Verification.tolerance`` it is the relative error of the value's change since the first step.
    """

    variant: str
    step: int
    rank: int
    name: str
    kind: str
    error_over_tolerance: float

    def to_json(self) -> dict[str, Any]:
        return {
            "variant": self.variant, "step": self.step, "rank": self.rank, "name": self.name, "kind": self.kind,
            "error_over_tolerance": self.error_over_tolerance,
        }  # fmt: skip


@dataclass(slots=True)
class Verification:
    """What a verification found.

    ``tolerance``: what a relative error may be, e.g. 1e-4. ``worst``: of each variant the value that is furthest off,
    in tolerances: see ``Difference``.
    """

    tolerance: float
    steps: int
    ranks: int
    compared: int = 0
    worst: dict[str, Difference] = field(default_factory=dict)
    gradients: list[Confirmation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        verdict = "equal" if self.equal else "NOT equal"
        over = f"{self.compared} comparisons on {self.ranks} ranks over {self.steps} steps"
        return f"<Verification {verdict}: {over}, tolerance {self.tolerance:g}>"

    @property
    def equal(self) -> bool:
        """Whether everything is within tolerance and every gradient was confirmed."""
        return all(each.error_over_tolerance <= 1 for each in self.worst.values()) and all(
            each.holds for each in self.gradients
        )

    def note(self, difference: Difference) -> None:
        self.compared += 1
        held = self.worst.get(difference.variant)
        if held is None or not difference.error_over_tolerance <= held.error_over_tolerance:
            self.worst[difference.variant] = difference

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal, "tolerance": self.tolerance, "steps": self.steps, "ranks": self.ranks,
            "compared": self.compared, "worst": {name: each.to_json() for name, each in self.worst.items()},
            "gradients": [each.to_json() for each in self.gradients], "notes": self.notes,
        }  # fmt: skip


def tolerance_of(graph: Graph) -> float:
    """Contract section 7: by the narrowest floating type that takes part."""
    dtypes = {type.dtype for type in graph.types.values()}
    return 5e-2 if "bfloat16" in dtypes else 2e-2 if "float16" in dtypes else 1e-4


def distance(value: np.ndarray, wanted: np.ndarray) -> float:
    """‖value − wanted‖ in float64; infinite where kinds of number, shapes, integers or infinities differ."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return float("inf")
    if not floating(wanted):
        return 0.0 if np.array_equal(value, wanted) else float("inf")
    mine, theirs = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(theirs)
    if not np.array_equal(np.isfinite(mine), finite) or not np.array_equal(
        mine[~finite], theirs[~finite], equal_nan=True
    ):
        return float("inf")
    return float(np.linalg.norm(mine[finite] - theirs[finite]))


def allowance(wanted: np.ndarray, start: np.ndarray, tolerance: float) -> float:
    """tol·‖Δref‖ + tol·1e-3·‖value‖ (contract section 7); ``start`` is the value before the first step."""
    if not floating(wanted):
        return 0.0
    theirs, base = np.asarray(wanted, np.float64), np.asarray(start, np.float64)
    finite = np.isfinite(theirs) & np.isfinite(base)
    change = np.linalg.norm(theirs[finite] - base[finite])
    return tolerance * float(change) + tolerance * 1e-3 * float(np.linalg.norm(theirs[finite]))


def floating(array: np.ndarray) -> bool:
    return bool(np.issubdtype(array.dtype, np.inexact)) or array.dtype.name == "bfloat16"


def ratio(error: float, allowed: float) -> float:
    """Above 1 is too far; 0 / 0 is equal."""
    return 0.0 if error == 0 else error / allowed if allowed else float("inf")


@dataclass(slots=True)
class Ledger:
    """The comparisons of one step. Parts of a sharded state are judged together, as the state they make up."""

    result: Verification
    variant: str
    step: int
    parts: dict[str, list[tuple[float, int, str]]] = field(default_factory=dict)

    def whole(self, rank: int, name: str, kind: str, value: np.ndarray, wanted: np.ndarray, start: np.ndarray) -> None:
        error = ratio(distance(value, wanted), allowance(wanted, start, self.result.tolerance))
        self.result.note(Difference(self.variant, self.step, rank, name, kind, error))

    def part(self, rank: int, name: str, kind: str, error: float) -> None:
        self.parts.setdefault(name, []).append((error, rank, kind))

    def close(self, wanted: Values, start: Values) -> None:
        for name, errors in self.parts.items():
            total = math.sqrt(sum(error * error for error, _, _ in errors))
            _, rank, kind = max(errors)
            error = ratio(total, allowance(wanted[name], start[name], self.result.tolerance))
            self.result.note(Difference(self.variant, self.step, rank, name, kind, error))
