"""The merge of what trainers pushed: in the order of trainers, never in the order in which it came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gopt.collectives.layout import HALVES
from gopt.ir.types import numpy_dtype
from gopt.runtime.memory import unpack_views
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one trainer pushed of a bucket: all keys behind one another, and its weight."""

    values: Array
    weight: float = 1.0


def merge(found: dict[int, Contribution], reduce: str, dtype: str, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """One value per shape. ``reduce``: mean over those that are there, sum, or weighted: sum of w g over sum of w.

    Halves are summed in float32 and rounded once, to ``dtype``. A trainer of weight zero adds nothing, whatever it
    sent; where all weights are zero the result is zero.
    """
    wanted = numpy_dtype(dtype)
    wide = np.dtype(np.float32) if dtype in HALVES else wanted
    total: Array | None = None
    weights = 0.0
    with np.errstate(all="ignore"):
        for trainer in sorted(found):
            each = found[trainer]
            weight = each.weight if reduce == "weighted" else 1.0
            weights += weight
            if not weight:
                continue
            term = each.values.astype(wide) if total is None or each.values.dtype != wide else each.values
            if reduce == "weighted":
                term = term * wide.type(weight)
            total = term if total is None else np.add(total, term, out=total)
        if total is None:
            total = np.zeros(sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes), wide)
        elif reduce != "sum":
            divisor = weights if reduce == "weighted" else len(found)
            total /= wide.type(divisor or 1.0)
        flat = total if wide == wanted else total.astype(wanted)
    return unpack_views(flat, shapes)
