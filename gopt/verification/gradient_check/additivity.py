"""Whether a value is a sum over samples: then its mean over ranks is its value on all their samples, gradient or not.

Two batches have their samples exchanged: for any sum over samples, f(ab) + f(ba) = f(aa) + f(bb), where ab has the
first samples of a and the rest of b. If the loss is such a sum, its gradient is, and so is every linear image of it; an
update, a clipped or normalised gradient, a product of gradients is not.

For b a second batch is taken, and a itself with its samples moved by one place: so every row of a table that any sample
looks up is met twice, never or once.

A step may show a sum and train a mean over a count of its batch: its gradients are such sums over that count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gopt.verification.gradient_check.forward import CheckedForward, Values

SPLITS = 2
"""Ways to part the samples that are tried."""


class Additivity(Enum):
    YES = "yes"
    NO = "no"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class SampleExchange:
    """Gradients where two batches meet: of both as they are, and with samples exchanged."""

    first: Values
    second: Values
    crossed: tuple[Values, Values]

    def judge(self, name: str, exact: float) -> Additivity:
        """Test whether a value is additive, up to ``exact`` relative; OPEN if few entries depend on both parts."""
        base = self.first[name]
        one, other = (each[name] - base for each in self.crossed)
        both = self.second[name] - base
        largest = max(float(np.abs(each).max(initial=0.0)) for each in (one, other, both))
        if not np.isfinite(largest) or largest == 0:
            return Additivity.OPEN
        shared = (np.abs(one) > 1e-4 * largest) & (np.abs(other) > 1e-4 * largest)
        total = float(np.linalg.norm(one) + np.linalg.norm(other))
        error = float(np.linalg.norm(both - one - other))
        # Rounding is that of the value, however little of it the batch moves.
        if error > 1e4 * exact * (total + float(np.linalg.norm(base))):
            return Additivity.NO
        heard = float(np.linalg.norm(one[shared]) + np.linalg.norm(other[shared]))
        return Additivity.YES if error <= exact * total and heard >= 0.5 * total else Additivity.OPEN


def sample_exchanges(
    forward: CheckedForward, points: Sequence[Values], batch: Sequence[str], generator: np.random.Generator,
    counts: Mapping[str, str],
) -> list[SampleExchange]:  # fmt: skip
    """Squares over exchanges of samples under which the loss is additive, along the first axis where it is.

    ``counts``: gradient -> the count of the batch that divides it, by which it is multiplied again.
    """
    here, other = ({name: point[name] for name in batch if name in point} for point in points[:2])
    if any(here[name].shape != other[name].shape for name in here):
        return []
    # What has no samples is the same in all four.
    other = {name: value if value.ndim else here[name] for name, value in other.items()}
    for axis in (0, 1):
        count = _samples(here, axis)
        if count < 2:
            continue
        rolled = {name: _rolled(value, count, axis) for name, value in here.items()}
        found: list[SampleExchange] = []
        for there in (other, rolled) * SPLITS:
            own = _some(count, generator)
            square = [here, there, _crossed(here, there, own, axis), _crossed(there, here, own, axis)]
            corners = [{**points[0], **values} for values in square]
            if not _losses_are_additive(forward, corners, generator):
                break
            aa, bb, ab, ba = (_sums(forward, corner, counts) for corner in corners)
            found.append(SampleExchange(aa, bb, (ab, ba)))
        else:
            return found
    return []


def _sums(forward: CheckedForward, point: Values, counts: Mapping[str, str]) -> Values:
    """The gradients at a point without the counts that divide them."""
    found = forward.loss_and_gradients(point)[1]
    by = forward.values([*dict.fromkeys(counts.values())], point) if counts else {}
    return {**found, **{name: found[name] * by[count] for name, count in counts.items()}}


def mixed(here: Values, there: Values, generator: np.random.Generator) -> Values | None:
    """Some samples of one batch and the rest of another; None for batches of one sample."""
    count = _samples(here, 0)
    return _crossed(here, there, _some(count, generator), 0) if count > 1 else None


def _samples(batch: Values, axis: int) -> int:
    """Return the number of samples of a batch along ``axis``: the length that most of its values have there."""
    sizes = [value.shape[axis] for value in batch.values() if value.ndim > axis]
    return max(sizes, key=lambda size: (size > 1, sizes.count(size)), default=0)


def _some(count: int, generator: np.random.Generator) -> np.ndarray:
    own = np.zeros(count, bool)
    own[generator.permutation(count)[: count // 2]] = True
    return own


def _rolled(value: np.ndarray, count: int, axis: int) -> np.ndarray:
    return np.roll(value, 1, axis) if value.ndim > axis and value.shape[axis] == count else value


def _crossed(here: Values, there: Values, own: np.ndarray, axis: int) -> Values:
    """Samples of ``here`` where ``own``, else of ``there``."""
    crossed = {}
    for name, value in here.items():
        splits = value.ndim > axis and value.shape[axis] == own.size
        keep = own.reshape(-1, *(1,) * (value.ndim - axis - 1)) if splits else True
        crossed[name] = np.where(keep, value, there[name])
    return crossed


def _losses_are_additive(forward: CheckedForward, corners: Sequence[Values], generator: np.random.Generator) -> bool:
    """At the point itself and at one near it, where a sum of losses that agrees by chance does not."""
    floating = [
        state.tensor for state in forward.training.parameters
        if state.tensor in corners[0] and np.issubdtype(corners[0][state.tensor].dtype, np.floating)
    ]  # fmt: skip
    moves = {name: 1e-2 * generator.standard_normal(corners[0][name].shape) for name in floating}
    for scale in (0.0, 1.0):
        losses = []
        for point in corners:
            moved = {name: (point[name] + scale * move).astype(point[name].dtype) for name, move in moves.items()}
            losses.append(forward.losses({**point, **moved}))
        aa, bb, ab, ba = losses
        spread, level = np.abs(bb - aa) + np.abs(ab - aa), np.abs(losses).max(axis=0)
        error = np.abs(aa + bb - ab - ba)
        rounding = forward.precision.rounding * level
        if not np.isfinite(level).all() or (error > 4 * rounding).any() or (spread < 1e3 * error).any():
            return False
        if (spread <= 1e3 * rounding).any():
            return False
    return True
