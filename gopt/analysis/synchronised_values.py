"""Values averaged by ranks in forward and backward: a record of the program and of its manifest."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.documents.records import key


@dataclass(frozen=True, slots=True)
class CorrectedConstant:
    """A constant of the batch's size: node ``output`` reads ``constant``, equal to ``value`` for the large batch."""

    output: str
    """The node that makes the value of this name reads the constant."""
    constant: str
    """The constant has this name in the source."""
    value: float
    """The node reads this number in the place of the constant."""


@dataclass(frozen=True, slots=True)
class SynchronisedValues:
    """Values averaged over the ranks at the point of computation, and constants that depend on the number of
    samples."""

    points: tuple[str, ...] = field(default=(), metadata=key("values"))
    """The values of the source in this list are averaged over all ranks that see different data as soon as they are
    made, for all nodes that read them. Each item is the name of a value of the source."""
    corrected: tuple[CorrectedConstant, ...] = field(default=(), metadata=key("constants"))
    """The list has the constants of the source that follow the number of samples, and what they are for the samples of
    all ranks. Each item is one constant as one node reads it."""
