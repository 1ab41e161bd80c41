"""A piece: a range of elements of a tensor of the source."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.documents.records import OPTIONAL
from gopt.sharding.boxes import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``start`` to ``stop`` of a flattened tensor of the source, or of a ``box`` of it: what a rank has where
    dimensions are sharded, one list of ranges per dimension."""

    tensor: str
    start: int
    stop: int
    box: Box | None = field(default=None, metadata=OPTIONAL)
    every: tuple[int, int] | None = field(default=None, metadata=OPTIONAL)
    """First and step: elements count in every step-th row of the tensor from the first on."""

    @property
    def elements(self) -> int:
        return self.stop - self.start
