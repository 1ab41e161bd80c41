"""Arithmetic on large arrays in pieces that fit into a cache: float64 copies of whole arrays take more memory and time
than the arithmetic itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

PIECE = 1 << 13
"""Elements of a piece: below what OpenBLAS multiplies with several threads, which wait busily for each other."""

_POOL = 1 << 20
"""Normal numbers that are drawn for one array, at most."""


def pieces(*arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Flat pieces of arrays of one size, in turn; views for contiguous arrays."""
    flat = [np.ravel(array) for array in arrays]
    for start in range(0, flat[0].size, PIECE):
        yield [array[start : start + PIECE] for array in flat]


def normal(generator: np.random.Generator, count: int, dtype: type[np.floating[Any]]) -> Iterator[np.ndarray]:
    """``count`` normal numbers, in pieces as above. For many numbers, each piece comes from another place of a pool:
    drawing takes ten times as long."""
    pool = generator.standard_normal(min(count, _POOL), dtype)
    for start in range(0, count, PIECE):
        size = min(PIECE, count - start)
        offset = start if count <= _POOL else int(generator.integers(_POOL - size))
        yield pool[offset : offset + size]


def dot(one: np.ndarray, twin: np.ndarray) -> float:
    """The sum of all products, in float64."""
    return sum(float(np.dot(*(np.asarray(piece, np.float64) for piece in two))) for two in pieces(one, twin))
