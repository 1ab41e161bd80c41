"""Values that ranks average in forward and backward: a record of the program and of its manifest."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.documents.records import key


@dataclass(frozen=True, slots=True)
class CorrectedConstant:
    """A constant of the batch's size: node ``output`` reads ``constant``, which the large batch has as ``value``."""

    output: str
    constant: str
    value: float


@dataclass(frozen=True, slots=True)
class SynchronisedValues:
    """Values that are averaged over the ranks where they are computed, and constants that depend on the number of
    samples.
    """

    points: tuple[str, ...] = field(default=(), metadata=key("values"))
    corrected: tuple[CorrectedConstant, ...] = field(default=(), metadata=key("constants"))
