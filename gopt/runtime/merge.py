"""Merges the pushes of trainers, in the order of trainers and not of arrival, so that results do not depend on
timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gopt.collectives.layout import HALVES
from gopt.ir.types import numpy_dtype
from gopt.runtime.memory import unpack_views
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class Contribution:
    """The push of one trainer to a bucket: all keys one after the other, and the weight.

    Of a table: ``ids``, each once and in ascending order, and a row of values for each.
    """

    values: Array
    weight: float = 1.0
    ids: Array | None = None


def merge(
    contributions: dict[int, Contribution], reduce: str, dtype: str, shapes: Sequence[tuple[int, ...]]
) -> list[Array]:
    """Return one value per shape.

    ``reduce``: "mean" over the present contributions, "sum", or "weighted": the sum of w g over the sum of w. float16
    and bfloat16 are summed in float32 and rounded once, to ``dtype``. A trainer of weight zero adds nothing, whatever
    it sent; with all weights zero the result is zero."""
    wanted = numpy_dtype(dtype)
    wide = np.dtype(np.float32) if dtype in HALVES else wanted
    total: Array | None = None
    weights = 0.0
    with np.errstate(all="ignore"):
        for trainer in sorted(contributions):
            contribution = contributions[trainer]
            weight = contribution.weight if reduce == "weighted" else 1.0
            weights += weight
            if not weight:
                continue
            term = (
                contribution.values.astype(wide)
                if total is None or contribution.values.dtype != wide
                else contribution.values
            )
            if reduce == "weighted":
                term = term * wide.type(weight)
            total = term if total is None else np.add(total, term, out=total)
        if total is None:
            total = np.zeros(sum(int(np.prod(shape, dtype=np.int64)) for shape in shapes), wide)
        elif reduce != "sum":
            divisor = weights if reduce == "weighted" else len(contributions)
            total /= wide.type(divisor or 1.0)
        flat = total if wide == wanted else total.astype(wanted)
    return unpack_views(flat, shapes)


def merge_rows(contributions: Mapping[int, Contribution], reduce: str, dtype: str, width: int) -> list[Array]:
    """Return the pushed ids, each once and in ascending order, and the merged rows.

    Rows have ``width`` elements, or are scalars for width 0. The result equals ``merge`` on whole gradients with
    zeros for absent rows: a mean divides by all contributions, with or without a row. A trainer of weight zero adds no
    rows."""
    wanted = numpy_dtype(dtype)
    wide = np.dtype(np.float32) if dtype in HALVES else wanted
    weights = {
        trainer: contribution.weight if reduce == "weighted" else 1.0
        for trainer, contribution in sorted(contributions.items())
    }
    lists = [_ids(contributions[trainer]) for trainer, weight in weights.items() if weight]
    ids = np.unique(np.concatenate([np.zeros(0, np.int64), *lists]))
    total = np.zeros((ids.size, width or 1), wide)
    with np.errstate(all="ignore"):
        for trainer, weight in weights.items():
            if not weight:
                continue
            push = contributions[trainer]
            term = push.values.reshape(-1, width or 1).astype(wide, copy=False)
            if reduce == "weighted":
                term = term * wide.type(weight)
            total[np.searchsorted(ids, _ids(push))] += term
        if reduce != "sum":
            total /= wide.type(sum(weights.values()) or 1.0)
        rows = total.astype(wanted, copy=False)
    return [ids, rows if width else rows.reshape(-1)]


def _ids(contribution: Contribution) -> Array:
    assert contribution.ids is not None
    return contribution.ids
