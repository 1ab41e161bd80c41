"""Reductions in memory shared by ranks of one host: each rank combines a slice of the inputs of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from gopt.collectives.layout import HALVES, flat_cuts
from gopt.collectives.reference import COMBINE
from gopt.runtime.session import Array

MIN_BYTES = 1 << 16
"""Bytes of a call from which sharing pays: below, the waits cost more than what MPI copies."""
TILE = 1 << 16
"""Elements that are combined at once: they stay in the cache from the first part to the last."""


def reduce_scatter(
    parts: Sequence[Array], member: int, cuts: Sequence[int], how: str, wait: Callable[[], None]
) -> Array:
    """Combine elements ``cuts[member]`` to ``cuts[member + 1]`` over all parts. Returns this slice of the member's own
    part.

    ``wait`` is a barrier over the members: after the first barrier all parts are written, after the last all are read
    and may be written again. ``how``: sum, mean, max or min."""
    wait()
    mine = parts[member][cuts[member] : cuts[member + 1]]
    _combine([part[cuts[member] : cuts[member + 1]] for part in parts], how, mine)
    wait()
    return mine


def all_reduce(parts: Sequence[Array], member: int, how: str, wait: Callable[[], None]) -> Array:
    """Combine all elements over all parts. Returns the member's own part. ``wait`` and ``how`` as for
    ``reduce_scatter``."""
    cuts = flat_cuts(parts[member].size, len(parts))
    reduce_scatter(parts, member, cuts, how, wait)
    for part, (start, stop) in zip(parts, pairwise(cuts)):
        if part is not parts[member]:
            parts[member][start:stop] = part[start:stop]
    wait()
    return parts[member]


def _combine(parts: Sequence[Array], how: str, into: Array) -> None:
    """Combine parts from first to last, bit for bit as the reference does; ``into`` may be a part."""
    combine, half = COMBINE[how], into.dtype.name in HALVES
    scratch = np.empty(min(TILE, into.size), np.float32 if half else into.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, into.size, TILE):
            head, *tail = (part[start : start + TILE] for part in parts)
            target = into[start : start + TILE]
            total = head.astype(np.float32) if half else head
            for number, piece in enumerate(tail, 1):
                # Only the last result may go to the target, which is one of the parts and still has to be read before.
                out = target if number == len(tail) and not half else scratch[: target.size]
                total = combine(total, piece, out=out)
            if how == "mean":
                np.divide(total, len(parts), out=total)
            if half:
                target[:] = total.astype(target.dtype)
