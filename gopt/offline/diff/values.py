"""The distance of two values: the largest difference, absolute and relative to the value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gopt.errors import OptionError
from gopt.ir.tensor import Tensor

BLOCK = 1 << 20
"""Elements that are compared at a time."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elements are equal where |a - b| <= ``atol`` + ``rtol`` |b|, or both are not numbers."""

    rtol: float = 0.0
    atol: float = 0.0

    def __post_init__(self) -> None:
        for name, bound in (("rtol", self.rtol), ("atol", self.atol)):
            if not 0 <= bound < float("inf"):  # NaN neither
                raise OptionError(f"--{name} cannot be {bound}", "give a number from 0")

    @property
    def exact(self) -> bool:
        return not (self.rtol or self.atol)


EXACT = Tolerance()


@dataclass(frozen=True, slots=True)
class Distance:
    """``most``: max |a - b|; ``relative``: ‖a - b‖ / ‖b‖, 0 where both are 0; ``outside``: elements beyond the
    tolerance."""

    most: float
    relative: float
    outside: int

    def __str__(self) -> str:
        return f"max |delta| {self.most:.3g}, relative {self.relative:.3g}"


def distance(a: Tensor, b: Tensor, tolerance: Tolerance = EXACT) -> Distance | None:
    """The distance of two tensors of one shape; None for non-numbers and for unequal shapes."""
    if a.type.shape != b.type.shape or not a.type.static or "string" in (a.type.dtype, b.type.dtype):
        return None
    old_values, new_values = a.flat(), b.flat()
    kind = np.complex128 if "complex" in f"{a.type.dtype} {b.type.dtype}" else np.float64
    most, square, norm, outside = 0.0, 0.0, 0.0, 0
    size = a.type.elements
    for start in range(0, size, BLOCK):
        old, new = (read(start, min(start + BLOCK, size)).astype(kind) for read in (old_values, new_values))
        equal = (old == new) | (np.isnan(old) & np.isnan(new))
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.where(equal, 0.0, np.abs(old - new))
            inside = equal | (gap <= tolerance.atol + tolerance.rtol * np.abs(new))
            gap = np.where(np.isnan(gap), np.inf, gap)
            most = max(most, float(gap.max(initial=0.0)))
            square += float(np.square(gap).sum())
            norm += float(np.square(np.abs(np.where(np.isfinite(new), new, 0.0))).sum())
        outside += int(inside.size - inside.sum())
    return Distance(most, _ratio(square, norm), outside)


def _ratio(square: float, norm: float) -> float:
    if square == 0:
        return 0.0
    return float(np.sqrt(square / norm)) if norm else float("inf")
