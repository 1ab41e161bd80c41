"""Whether a value is a sum over samples: then the mean over ranks is the value on all their samples, gradient or not.

Two batches have their samples exchanged: for any sum over samples, f(ab) + f(ba) = f(aa) + f(bb), where ab has the
first samples of a and the rest of b. If the loss is such a sum, so are the gradient and every linear image of it; an
update, a clipped or normalised gradient, a product of gradients is not.

For b a second batch is taken, and a itself with samples moved by one place: so every row of a table looked up by any
sample is met twice, never or once.

A step may show a sum and train a mean over a count of the batch: the gradients are such sums over the count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gopt.verification.gradient_check.forward import CheckedForward, Values
from gopt.verification.side_by_side import side_by_side

SPLITS = 2
"""Ways to part the samples that are tried."""


class Additivity(Enum):
    YES = "yes"
    NO = "no"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class SampleExchange:
    """Gradients where two batches meet: of both unchanged, and with samples exchanged. ``due``: whether the loss is a
    sum over samples, as a gradient then is too."""

    first: Values
    second: Values
    crossed: tuple[Values, Values]
    due: bool = True

    def judge(self, name: str, exact: float) -> Additivity:
        """Test whether a value is additive, up to ``exact`` relative; OPEN if few entries depend on both parts."""
        base = self.first[name]
        change_a, change_b = (point[name] - base for point in self.crossed)
        change_ab = self.second[name] - base
        largest = max(float(np.abs(change).max(initial=0.0)) for change in (change_a, change_b, change_ab))
        if not np.isfinite(largest) or largest == 0:
            return Additivity.OPEN
        shared = (np.abs(change_a) > 1e-4 * largest) & (np.abs(change_b) > 1e-4 * largest)
        total = float(np.linalg.norm(change_a) + np.linalg.norm(change_b))
        error = float(np.linalg.norm(change_ab - change_a - change_b))
        # Rounding follows the value, however little of it the batch moves.
        if error > 1e4 * exact * (total + float(np.linalg.norm(base))):
            return Additivity.NO
        heard = float(np.linalg.norm(change_a[shared]) + np.linalg.norm(change_b[shared]))
        return Additivity.YES if error <= exact * total and heard >= 0.5 * total else Additivity.OPEN


def sample_exchanges(
    forward: CheckedForward, points: Sequence[Values], batch: Sequence[str], generator: np.random.Generator,
    counts: Mapping[str, str],
) -> Iterator[SampleExchange]:  # fmt: skip
    """Squares over exchanges of samples, along the first axis with an additive loss, or else along the first axis with
    samples: a step may show another loss than the trained loss.

    ``counts``: gradient -> the count of the batch that divides the gradient, multiplied again here."""
    batch_a, batch_b = ({name: point[name] for name in batch if name in point} for point in points[:2])
    if any(batch_a[name].shape != batch_b[name].shape for name in batch_a):
        return
    # What has no samples is the same in all four.
    batch_b = {name: value if value.ndim else batch_a[name] for name, value in batch_b.items()}
    shown_apart: list[list[Values]] = []
    for axis in (0, 1):
        count = _samples(batch_a, axis)
        if count < 2:
            continue
        rolled = {name: _rolled(value, count, axis) for name, value in batch_a.items()}
        squares: list[list[Values]] = []
        for partner in (batch_b, rolled) * SPLITS:
            mask = _some(count, generator)
            square = [batch_a, partner, _crossed(batch_a, partner, mask, axis), _crossed(partner, batch_a, mask, axis)]
            squares.append([{**points[0], **values} for values in square])
        if all(_losses_are_additive(forward, corners, generator) for corners in squares):
            yield from (_exchange(forward, corners, counts, due=True) for corners in squares)
            return
        shown_apart = shown_apart or squares
    yield from (_exchange(forward, corners, counts, due=False) for corners in shown_apart)


def _exchange(
    forward: CheckedForward, corners: Sequence[Values], counts: Mapping[str, str], *, due: bool
) -> SampleExchange:
    aa, bb, ab, ba = side_by_side(lambda corner: _sums(forward, corner, counts), corners, forward.abreast)
    return SampleExchange(aa, bb, (ab, ba), due)


def _sums(forward: CheckedForward, point: Values, counts: Mapping[str, str]) -> Values:
    """The gradients at a point without the dividing counts."""
    gradients = forward.loss_and_gradients(point)[1]
    by = forward.values([*dict.fromkeys(counts.values())], point) if counts else {}
    return {**gradients, **{name: gradients[name] * by[count] for name, count in counts.items()}}


def mixed(batch_a: Values, batch_b: Values, generator: np.random.Generator) -> Values | None:
    """Some samples of one batch and the rest of another; None for batches of one sample."""
    count = _samples(batch_a, 0)
    return _crossed(batch_a, batch_b, _some(count, generator), 0) if count > 1 else None


def _samples(batch: Values, axis: int) -> int:
    """Return the number of samples of a batch along ``axis``: the length of most of the values."""
    sizes = [value.shape[axis] for value in batch.values() if value.ndim > axis]
    return max(sizes, key=lambda size: (size > 1, sizes.count(size)), default=0)


def _some(count: int, generator: np.random.Generator) -> np.ndarray:
    mask = np.zeros(count, bool)
    mask[generator.permutation(count)[: count // 2]] = True
    return mask


def _rolled(value: np.ndarray, count: int, axis: int) -> np.ndarray:
    return np.roll(value, 1, axis) if value.ndim > axis and value.shape[axis] == count else value


def _crossed(batch_a: Values, batch_b: Values, mask: np.ndarray, axis: int) -> Values:
    """Samples of ``batch_a`` where ``mask``, else of ``batch_b``."""
    crossed = {}
    for name, value in batch_a.items():
        splits = value.ndim > axis and value.shape[axis] == mask.size
        keep = mask.reshape(-1, *(1,) * (value.ndim - axis - 1)) if splits else True
        crossed[name] = np.where(keep, value, batch_b[name])
    return crossed


def _losses_are_additive(forward: CheckedForward, corners: Sequence[Values], generator: np.random.Generator) -> bool:
    """At the point itself and at a near point, where a sum of losses that agrees by chance does not."""
    floating = [
        state.tensor for state in forward.training.parameters
        if state.tensor in corners[0] and np.issubdtype(corners[0][state.tensor].dtype, np.floating)
    ]  # fmt: skip
    moves = {name: 1e-2 * generator.standard_normal(corners[0][name].shape) for name in floating}
    for scale in (0.0, 1.0):
        moved = [
            {**point, **{name: (point[name] + scale * move).astype(point[name].dtype) for name, move in moves.items()}}
            for point in corners
        ]
        aa, bb, ab, ba = losses = side_by_side(forward.losses, moved, forward.abreast)
        spread, level = np.abs(bb - aa) + np.abs(ab - aa), np.abs(losses).max(axis=0)
        error = np.abs(aa + bb - ab - ba)
        rounding = forward.precision.rounding * level
        if not np.isfinite(level).all() or (error > 4 * rounding).any() or (spread < 1e3 * error).any():
            return False
        if (spread <= 1e3 * rounding).any():
            return False
    return True
