"""Tolerances (contract section 7): distances, allowances, and the record of one step's comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gopt.ir.graph import Graph
from gopt.verification.piecewise import pieces
from gopt.verification.result import Difference, Verification

Values = dict[str, np.ndarray]


TOLERANCE = 1e-4
"""Without halves."""


def tolerance_of(graph: Graph) -> float:
    """Contract section 7: by the narrowest participating floating type."""
    dtypes = {type.dtype for type in graph.types.values()}
    return 5e-2 if "bfloat16" in dtypes else 2e-2 if "float16" in dtypes else TOLERANCE


def distance(value: np.ndarray, wanted: np.ndarray) -> float:
    """‖value − wanted‖ in float64; infinite where kinds of number, shapes, integers or infinities differ.

    NaN agrees with nothing, not even with NaN."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return float("inf")
    if not floating(wanted):
        return 0.0 if np.array_equal(value, wanted) else float("inf")
    apart = distance_of(value, wanted)
    if math.isfinite(apart):  # so are both, everywhere
        return apart
    mine, theirs = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
    finite = np.isfinite(theirs)
    if not np.array_equal(np.isfinite(mine), finite) or not np.array_equal(mine[~finite], theirs[~finite]):
        return float("inf")
    return float(np.linalg.norm(mine[finite] - theirs[finite]))


def same_bits(one: np.ndarray, twin: np.ndarray) -> bool:
    """Return whether two flat arrays hold the same bits in the same type."""
    if one.dtype != twin.dtype or one.size != twin.size or not one.size:
        return False
    if not (one.flags.c_contiguous and twin.flags.c_contiguous):
        return False
    return bool(np.array_equal(one.view(np.uint8), twin.view(np.uint8)))


def same_values(ours: Values, theirs: Values) -> bool:
    """Return whether values have the same names and bits."""
    return ours.keys() == theirs.keys() and all(
        value is theirs[name] or same_bits(value.ravel(), theirs[name].ravel()) for name, value in ours.items()
    )


def allowance(wanted: np.ndarray, start: np.ndarray, tolerance: float) -> float:
    """tol·‖Δref‖ + tol·1e-3·‖value‖ (contract section 7); ``start`` is the value before the first step."""
    if not floating(wanted):
        return 0.0
    change, size = distance_of(wanted, start), length(wanted)
    if not math.isfinite(change + size):
        theirs, base = np.asarray(wanted, np.float64), np.asarray(start, np.float64)
        finite = np.isfinite(theirs) & np.isfinite(base)
        change, size = float(np.linalg.norm(theirs[finite] - base[finite])), float(np.linalg.norm(theirs[finite]))
    return tolerance * change + tolerance * 1e-3 * size


def length(value: np.ndarray) -> float:
    """‖value‖ in float64; not finite where an element is not, or a square is too large."""
    return distance_of(value)


def distance_of(*values: np.ndarray) -> float:
    """The same of the difference of two values of one size, or of one value."""
    square = 0.0
    with np.errstate(all="ignore"):
        for some in pieces(*values):
            wide = [np.asarray(value, np.float64) for value in some]
            apart = wide[0] - wide[1] if len(wide) > 1 else wide[0]
            square += float(apart.dot(apart))
    return math.sqrt(square) if square >= 0 else math.nan


def floating(array: np.ndarray) -> bool:
    return bool(np.issubdtype(array.dtype, np.inexact)) or array.dtype.name == "bfloat16"


def finite(array: np.ndarray) -> bool:
    """Return whether all elements are finite numbers."""
    return not floating(array) or math.isfinite(length(array)) or bool(np.isfinite(np.asarray(array, np.float64)).all())


def became_not_finite(new: np.ndarray, old: np.ndarray) -> bool:
    """Return whether a finite element has become infinite or NaN, or any element NaN."""
    if finite(new):
        return False
    after, before = np.asarray(new, np.float64), np.asarray(old, np.float64)
    return bool((~np.isfinite(after) & np.isfinite(before)).any()) or bool(np.isnan(after).any())


def ratio(error: float, allowed: float) -> float:
    """Above 1 is too far; 0 / 0 is equal."""
    return 0.0 if error == 0 else error / allowed if allowed else float("inf")


@dataclass(slots=True)
class StepComparisons:
    """The comparisons of one step. Parts of a sharded state are judged together, as one state.

    ``floors``: tolerances of a value in addition to contract section 7; ``spans``: the least and greatest right values
    of elements.
    """

    tolerance: float
    variant: str
    step: int
    floors: dict[str, float] = field(default_factory=dict)
    spans: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    entries: list[Difference] = field(default_factory=list)
    parts: dict[str, list[tuple[float, int, str]]] = field(default_factory=dict)

    def allowed(self, name: str, wanted: np.ndarray, start: np.ndarray) -> float:
        return allowance(wanted, start, self.tolerance) + self.floors.get(name, 0.0)

    def enter(self, rank: int, name: str, kind: str, error: float) -> None:
        """An error already counted in tolerances."""
        self.entries.append(Difference(self.variant, self.step, rank, name, kind, error))

    def whole(self, rank: int, name: str, kind: str, value: np.ndarray, wanted: np.ndarray, start: np.ndarray) -> None:
        self.enter(rank, name, kind, self.error(name, value, wanted, start))

    def error(self, name: str, value: np.ndarray, wanted: np.ndarray, start: np.ndarray) -> float:
        """Return the error of a value, in multiples of its tolerance."""
        apart = distance(value, wanted)
        return ratio(apart, self.allowed(name, wanted, start)) if apart else 0.0

    def part(self, rank: int, name: str, kind: str, error: float) -> None:
        self.parts.setdefault(name, []).append((error, rank, kind))

    def close(self, wanted: Values, start: Values) -> None:
        """Judge values compared in parts."""
        for name, errors in self.parts.items():
            total = math.sqrt(sum(error * error for error, _, _ in errors))
            _, rank, kind = max(errors)
            self.enter(rank, name, kind, ratio(total, self.allowed(name, wanted[name], start[name])))
        self.parts.clear()

    def failing(self) -> set[str]:
        """Names of values that are too far off."""
        return {entry.name for entry in self.entries if entry.fails}

    def without(self, names: Iterable[str]) -> StepComparisons:
        """The same without some values: another record judges these."""
        left_out = set(names)
        return replace(self, entries=[entry for entry in self.entries if entry.name not in left_out])

    def write(self, result: Verification) -> None:
        for entry in self.entries:
            result.note(entry)
