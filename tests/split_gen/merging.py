"""What servers do with arrays of several senders. Nothing of gopt is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rank_files import HALVES, Array, shape_of


class Fault(Exception):
    """The folder breaks what the manifest or the operators say."""


def merged(given: Sequence[tuple[float, Array]], reduce: str, dtype: np.dtype[Any]) -> Array:
    """Contributions in order of trainers, summed in float32, rounded once."""
    wide = np.dtype(np.float32) if dtype in HALVES else dtype
    with np.errstate(all="ignore"):
        terms = [value.astype(wide) for _, value in given]
        if reduce == "weighted":
            terms = [value * wide.type(weight) for (weight, _), value in zip(given, terms, strict=True) if weight]
        total = terms[0] if terms else np.zeros_like(given[0][1], wide)
        for term in terms[1:]:
            total = total + term
        if reduce == "mean":
            total = total / wide.type(len(given))
        elif reduce == "weighted":
            total = total / wide.type(sum(weight for weight, _ in given) or 1.0)
        return np.asarray(total).astype(dtype)


def same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def cut(flat: Array, shapes: Sequence[str], what: str) -> list[Array]:
    """A message's elements as tensors, behind one another."""
    sizes = [int(np.prod(shape_of(text), dtype=int)) for text in shapes]
    if sum(sizes) != flat.size:
        raise Fault(f"{what}: {flat.size} elements travel, {sum(sizes)} are expected")
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape_of(text)) for part, text in zip(parts, shapes, strict=True)]
