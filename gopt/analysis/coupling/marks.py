"""How values depend on the samples of a batch, and the records of where samples are coupled.

A value without a mark does not depend on the batch. With the batches of N ranks concatenated, a ``SAMPLES`` value is
the concatenation of the ranks' values, ``SUM`` their sum, ``MEAN`` their mean, ``WEIGHTED`` a mean by another value,
``MAX`` and ``MIN`` their extremes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations
from math import isclose, prod
from typing import Any


class Relation(Enum):
    """Relation between a value of the one large batch and the values of the ranks."""

    SAMPLES = "samples"
    """Concatenated along one axis."""
    DRAWN = "drawn"
    """Random numbers of no sample yet: any axis may be the samples'."""
    SUM = "sum"
    MEAN = "mean"
    WEIGHTED = "weighted"
    """Mean by the value ``by``."""
    MAX = "max"
    MIN = "min"
    GATE = "gate"
    """A comparison of values reduced over samples."""
    JOINT = "joint"
    """Any other function of values reduced over samples."""
    UNKNOWN = "unknown"


EXTREMES = frozenset((Relation.MAX, Relation.MIN))
REDUCED = EXTREMES | {Relation.SUM, Relation.MEAN, Relation.WEIGHTED, Relation.GATE, Relation.JOINT}


@dataclass(frozen=True, slots=True)
class Mark:
    """Relation of a value to the samples of a batch, with its details.

    ``SAMPLES``: dimension ``axis`` is ``outer`` x samples x ``inner``, row-major. ``factor``: the product of constant
    factors since the last other change, 0 with an unknown factor; ``divided``: the number of divisions by a size of the
    batch, None for another function of such a size. ``mixed``: an earlier fact says already that
    samples meet samples.

    A reduced value: ``origin`` is the value in which samples were reduced, ``sizes`` the other dimensions reduced with
    them, ``count`` the number of elements (0: not known), ``doubt`` that a batch of this size does not tell a sum from
    a mean; ``even``: the value is the large batch's if each origin is replaced by its mean over the ranks.
    """

    kind: Relation
    axis: int = 0
    outer: int = 1
    inner: int = 1
    factor: float = 1.0
    divided: int | None = 0
    origin: str = ""
    sizes: tuple[int, ...] = ()
    by: str = ""
    doubt: bool = False
    mixed: bool = False
    count: int = 0
    even: bool = True

    @property
    def sound(self) -> bool:
        """Whether means of the origins over the ranks make the value the large batch's: a bare sum grows with it."""
        return (
            self.even
            and not self.doubt
            and self.kind in (Relation.MEAN, Relation.WEIGHTED, Relation.JOINT, Relation.GATE)
        )


def changed(mark: Mark, **changes: Any) -> Mark:
    """The mark with other values in some fields; the same object for equal values, the usual case."""
    for name, value in changes.items():
        if getattr(mark, name) != value:
            return replace(mark, **changes)
    return mark


UNKNOWN = Mark(Relation.UNKNOWN)
DRAWN = Mark(Relation.DRAWN)
Marks = list[Mark | None]


class Untraceable(Exception):
    """Raised when the sample dimension cannot be followed through a node; the text gives the reason."""


class CouplingKind(str, Enum):
    """Reason why a step is not the step of one large batch."""

    STATISTICS = "statistics"
    """A value reduced over samples flows back into values of single samples."""
    WEIGHTED = "weighted_loss"
    """The loss is divided by a count that depends on the batch."""
    IGNORED = "ignored_labels"
    """The count is the number of labels that are not ignored: no note is made of it."""
    SUMMED = "summed_loss"
    IN_BATCH = "in_batch"
    """Samples are multiplied or compared with samples."""
    LOSS_DRIVEN = "loss_driven"
    """The update reads the loss, or another value of the rank's own batch."""
    NONLINEAR = "nonlinear_loss"
    """The loss is not a mean of losses of single samples."""
    REDUCTION = "loss_reduction"
    """The gradients are reduced otherwise than the loss is."""
    PLACE = "by_place"
    """The position of a sample in the batch decides how it is treated."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Coupling:
    """One place where a step is not the step of one large batch: which value, made by which operator.

    ``what`` is a sentence, ``exact`` what would make it exact ('' where gopt knows nothing).
    """

    kind: CouplingKind
    """The kind says what couples the samples; the page on configuration explains each kind."""
    value: str
    """The coupling begins at the value of this name of the source."""
    operator: str
    """The operator of this type makes the value."""
    what: str
    """The sentence says what is coupled."""
    exact: str = ""
    """The text names what would make the step exact; it is empty when gopt knows nothing."""

    def to_json(self) -> dict[str, str]:
        return {
            "kind": self.kind.value, "value": self.value, "operator": self.operator, "what": self.what,
            "exact": self.exact,
        }  # fmt: skip

    @property
    def note(self) -> str:
        """One line for people."""
        return f"not the step of one large batch: {self.what}" + (f" ({self.exact})" if self.exact else "")


def products(sizes: Iterable[int]) -> set[int]:
    """Products of all subsets of some dimensions, 1 included."""
    largest = sorted((size for size in sizes if size > 1), reverse=True)[:8]
    return {prod(part) for length in range(len(largest) + 1) for part in combinations(largest, length)}


@dataclass(frozen=True, slots=True)
class Division:
    """Possible meanings of a constant factor of a sum: it divides by the batch, by other dimensions alone, or by
    either.
    """

    by_batch: bool
    by_others: bool


def division(factor: float, batch: int, sizes: Iterable[int]) -> Division:
    """Test whether 1 / ``factor`` is the batch size times other reduced sizes, or a product of such sizes alone; a half
    comes as often from a square as from two samples."""
    if not factor:
        return Division(False, False)
    known, over = products(sizes), 1.0 / abs(factor)
    near = [size for size in known if isclose(over, size, rel_tol=1e-6)]
    return Division(any(isclose(over, batch * size, rel_tol=1e-6) for size in known), bool(near) or over == batch == 2)
