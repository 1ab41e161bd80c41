"""What windows and their terms mean, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gopt.records.placements import Window, WindowTerms

Array = np.ndarray


def windowed(whole: Array, window: Window, member: int) -> Array:
    """A member's window, and what its border says beside the dimension: not contiguous where that is possible."""
    low, high = window.ranges[member]
    fill = 0
    if window.border == "lowest":
        fill = -np.inf if whole.dtype.kind == "f" else np.iinfo(whole.dtype).min
    before, behind = max(-low, 0), max(high - whole.shape[window.dim], 0)
    pads = [(before, behind) if dim == window.dim else (0, 0) for dim in range(whole.ndim)]
    padded = np.pad(whole, pads, constant_values=fill)
    return np.asfortranarray(padded.take(range(low + before, high + before), window.dim))


def summed(parts: Sequence[Array], terms: WindowTerms) -> Array:
    """The sum of members' terms, each in its places; what is beside the dimension belongs to nothing."""
    shape = [terms.length if dim == terms.dim else size for dim, size in enumerate(parts[0].shape)]
    made = np.zeros(shape, parts[0].dtype)
    front = np.moveaxis(made, terms.dim, 0)
    for (start, stop), part in zip(terms.ranges, parts):
        low, high = max(start, 0), max(min(stop, terms.length), start, 0)
        front[low:high] += np.moveaxis(part, terms.dim, 0)[low - start : high - start]
    return made


def terms_of(whole: Array, terms: WindowTerms, generator: np.random.Generator) -> list[Array]:
    """Some terms whose sum is the value, where anybody has terms."""
    made = []
    left = np.moveaxis(whole, terms.dim, 0).copy()
    for member, (low, high) in enumerate(terms.ranges):
        mine = generator.integers(-4, 4, (high - low, *left.shape[1:])).astype(whole.dtype)
        for place in range(max(low, 0), min(high, terms.length)):
            if not any(start <= place < stop for start, stop in terms.ranges[member + 1 :]):
                mine[place - low] = left[place]
            left[place] -= mine[place - low]
        made.append(np.moveaxis(mine, 0, terms.dim))
    return made
