"""What trainers pushed of a round, bucket by bucket, and how it is merged.

Contributions are merged in the order of trainers, never in the order in which they came: results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gopt.collectives.layout import HALVES
from gopt.ir.types import numpy_dtype
from gopt.runtime.memory import unpack_views
from gopt.runtime.messages.message import Message
from gopt.runtime.session import Array


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one trainer pushed of a bucket: all keys behind one another, and its weight."""

    values: Array
    weight: float = 1.0


@dataclass(slots=True)
class Contributions:
    """Contributions by round and bucket. A second one of the same trainer to the same round and bucket, and one to a
    round that is over, is dropped and counted: a message is applied once at most."""

    round: int = 0
    dropped: int = 0
    _held: dict[tuple[int, int], dict[int, Contribution]] = field(default_factory=dict)

    def add(self, message: Message) -> bool:
        """Take a PUSH; returns whether it counts."""
        slot = self._held.setdefault((message.round, message.key), {})
        if message.round < self.round or message.source in slot:
            self.dropped += 1
            if not slot:
                del self._held[message.round, message.key]
            return False
        weight = 1.0 if message.note is None else float(message.note["weight"])
        slot[message.source] = Contribution(message.arrays[0], weight)
        return True

    def of(self, bucket: int) -> dict[int, Contribution]:
        """What came of a bucket in this round, by trainer."""
        return self._held.get((self.round, bucket), {})

    def any(self) -> bool:
        """Whether anything came of this round."""
        return any(number == self.round for number, _ in self._held)

    def next_round(self) -> None:
        """Forget this round."""
        for key in [key for key in self._held if key[0] <= self.round]:
            del self._held[key]
        self.round += 1


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
