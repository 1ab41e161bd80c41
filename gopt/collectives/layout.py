"""Text form of a bucket: shapes, cuts, and bytes per element.

Pure arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from gopt.errors import InputError, InvariantError

ALIGN = 16
"""Elements to which a flat shard is rounded up (contract section 1)."""

HALVES = frozenset({"float16", "bfloat16"})
FLOATS = HALVES | {"float32", "float64"}
INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})

ITEM_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8e4m3fn": 1, "float8e4m3fnuz": 1, "float8e5m2": 1, "float8e5m2fnuz": 1, "float8e8m0": 1,
}  # fmt: skip
"""Bytes of one element of every type that may travel; strings and types of half a byte may not."""

_DIGITS = 18
"""Longest dimension read, in digits: what fits 64 bits. A file may hold anything."""


def parse_shapes(strings: Iterable[str]) -> list[tuple[int, ...]]:
    """``["64,32", ""]`` -> ``[(64, 32), ()]``: the empty string is a scalar. Raises InputError on anything else."""
    return [_parse_shape(text) for text in strings]


@functools.lru_cache(maxsize=1024)
def _parse_shape(text: str) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    # isdigit alone takes digits of other scripts, and int() takes signs, blanks and underscores.
    if not all(part.isascii() and part.isdigit() and len(part) <= _DIGITS for part in parts):
        raise InputError(f"cannot read {text[:80]!r} as a shape", 'write it as "64,32"; a scalar is ""')
    return tuple(int(part) for part in parts)


def format_shape(shape: Sequence[int]) -> str:
    """``(64, 32)`` -> ``"64,32"``; ``()`` -> ``""``. The inverse of parse_shapes."""
    return ",".join(str(size) for size in shape)


def flat_cuts(elements: int, ranks: int, align: int = ALIGN) -> list[int]:
    """Cuts of a bucket of ``elements`` among ``ranks``: cuts[r] = min(E, r·S), S = ⌈E/N⌉ rounded up to ``align``.

    ``ranks + 1`` element offsets; the last shards may be short or empty. Raises InvariantError on fewer than one
    rank, an alignment below 1 or a negative length.
    """
    if elements < 0 or ranks < 1 or align < 1:
        raise InvariantError(f"no cuts of {elements} elements among {ranks} ranks, aligned to {align}")
    share = -(-elements // ranks)
    share = -(-share // align) * align
    return [min(elements, rank * share) for rank in range(ranks + 1)]


def total_elements(shapes: Iterable[Sequence[int]]) -> int:
    """Elements of all shapes together."""
    return sum(math.prod(shape) for shape in shapes)


def lengths(cuts: Sequence[int]) -> list[int]:
    """Elements between each cut and the next: the members' shards."""
    return [stop - start for start, stop in pairwise(cuts)]


def resized(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """A shape with another size of an axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])
