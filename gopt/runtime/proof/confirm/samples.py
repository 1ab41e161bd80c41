"""Whether a value is a sum over samples: then its mean over ranks is its value on all their samples, gradient or not.

Two batches have their samples exchanged: for any sum over samples, f(ab) + f(ba) = f(aa) + f(bb), where ab has the
first samples of a and the rest of b. If the loss is such a sum, its gradient is, and so is every linear image of it; an
update, a clipped or normalised gradient, a product of gradients is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gopt.runtime.proof.confirm.forward import Forward, Values

SPLITS = 2


class Additive(Enum):
    YES = "yes"
    NO = "no"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Square:
    """Gradients where two batches meet: of both as they are, and with samples exchanged."""

    first: Values
    second: Values
    crossed: tuple[Values, Values]

    def judge(self, name: str, exact: float) -> Additive:
        """Whether one value is additive, up to ``exact`` relative; OPEN where too few entries depend on both parts."""
        base = self.first[name]
        one, other = (each[name] - base for each in self.crossed)
        both = self.second[name] - base
        largest = max(float(np.abs(each).max(initial=0.0)) for each in (one, other, both))
        if not np.isfinite(largest) or largest == 0:
            return Additive.OPEN
        shared = (np.abs(one) > 1e-4 * largest) & (np.abs(other) > 1e-4 * largest)
        total = float(np.linalg.norm(one) + np.linalg.norm(other))
        error = float(np.linalg.norm(both - one - other))
        if error > 1e4 * exact * total:
            return Additive.NO
        heard = float(np.linalg.norm(one[shared]) + np.linalg.norm(other[shared]))
        return Additive.YES if error <= exact * total and heard >= 0.5 * total else Additive.OPEN


def exchanged(batches: Sequence[Values], generator: np.random.Generator) -> list[tuple[Values, Values]]:
    """Two batches with some of their samples exchanged, for each axis that may be the one of the samples."""
    found = []
    for axis in (0, 1):
        sizes = [value.shape[axis] for value in batches[0].values() if value.ndim > axis]
        if not sizes or max(sizes) < 2:
            continue
        count = max(set(sizes), key=lambda size: (size > 1, sizes.count(size)))
        own = np.zeros(count, bool)
        own[generator.permutation(count)[: max(count // 2, 1)]] = True
        pair = tuple(
            {name: _crossed(value, there[name], own, axis) for name, value in here.items()}
            for here, there in ((batches[0], batches[1]), (batches[1], batches[0]))
        )
        found.append((pair[0], pair[1]))
    return found


def _crossed(here: np.ndarray, there: np.ndarray, own: np.ndarray, axis: int) -> np.ndarray:
    if here.ndim <= axis or here.shape[axis] != own.size or here.shape != there.shape:
        return here
    keep = own.reshape(-1, *(1,) * (here.ndim - axis - 1))
    return np.where(keep, here, there)


def squares(
    forward: Forward, points: Sequence[Values], batch: Sequence[str], generator: np.random.Generator
) -> list[Square]:
    """Squares of the first two points over exchanges of samples under which the loss is additive; none, else."""
    here, there = ({name: point[name] for name in batch if name in point} for point in points[:2])
    if any(here[name].shape != there[name].shape for name in here):
        return []
    shared = {name for name in here if here[name].ndim == 0}
    there |= {name: here[name] for name in shared}
    corners = [{**points[0], **here}, {**points[0], **there}]
    found: list[Square] = []
    for _ in range(SPLITS):
        for pair in exchanged([here, there], generator):
            crossed = [{**points[0], **each} for each in pair]
            if _loss_is_additive(forward, corners, crossed, generator):
                values = [forward.everything(point)[1] for point in (*corners, *crossed)]
                found.append(Square(values[0], values[1], (values[2], values[3])))
                break
    return found if len(found) == SPLITS else []


def _loss_is_additive(
    forward: Forward, corners: Sequence[Values], crossed: Sequence[Values], generator: np.random.Generator
) -> bool:
    """At the point itself and at one beside it: a sum of losses that only happens to agree does not stay so."""
    floating = [
        state.tensor for state in forward.training.parameters
        if state.tensor in corners[0] and np.issubdtype(corners[0][state.tensor].dtype, np.floating)
    ]  # fmt: skip
    moves = {name: 1e-2 * generator.standard_normal(corners[0][name].shape) for name in floating}
    for scale in (0.0, 1.0):
        losses = []
        for point in (*corners, *crossed):
            moved = {name: (point[name] + scale * move).astype(point[name].dtype) for name, move in moves.items()}
            losses.append(forward.loss({**point, **moved}))
        aa, bb, ab, ba = losses
        spread, level = abs(bb - aa) + abs(ab - aa), max(map(abs, losses))
        error = abs(aa + bb - ab - ba)
        if not np.isfinite(level) or error > 4 * forward.precision.rounding * level or spread < 1e3 * error:
            return False
        if spread <= 1e3 * forward.precision.rounding * level:
            return False
    return True
