"""Where the tokens of a batch stand in a value: the dimension that sequence parallelism shares out."""

from __future__ import annotations

from dataclasses import dataclass

from gopt.analysis.training import TrainingGraph
from gopt.ir.types import TensorType
from gopt.sharding.placements import Shard
from gopt.tensor_parallel.sizes import Sizes, part_sizes


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch of ``samples`` sequences of ``length`` tokens, shared out in ``sizes``."""

    samples: int
    length: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, training: TrainingGraph, members: int, rule: Sizes) -> Tokens | None:
        """The tokens of the batch: of its first input of two dimensions or more; None where none is, or they are too
        few."""
        for name in training.batch:
            type = training.graph.types[name]
            if type.static and len(type.dims) >= 2 and type.dims[1] >= members:
                return cls(type.dims[0], type.dims[1], part_sizes(type.dims[1], members, rule))
        return None

    def shard(self, type: TensorType) -> Shard | None:
        """How a value is shared out by tokens; None where it has no dimension of them."""
        if not type.static or len(type.dims) < 2 or type.elements <= self.samples * self.length:
            return None
        if type.dims[:2] == (self.samples, self.length) and len(type.dims) > 2:
            return Shard(1, self.sizes)
        if type.dims[0] == self.samples * self.length:
            return Shard(0, self.sizes, self.samples)
        return None
