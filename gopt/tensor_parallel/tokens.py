"""Finds the samples and tokens of a batch in a value, and divides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gopt.analysis.training import TrainingGraph
from gopt.ir.types import FLOATS, TensorType
from gopt.operators.kinds import PRODUCTS
from gopt.records.placements import Partial, Placement, Shard
from gopt.tensor_parallel.forward import Forward
from gopt.tensor_parallel.sizes import Sizes, part_sizes


def inputs_of_tokens(training: TrainingGraph, fed: bool) -> dict[str, TensorType]:
    """The inputs of the batch of two or more dimensions, samples and tokens ahead; with ``fed``, integers of two
    dimensions and floats of three alone."""
    types = {name: training.graph.types[name] for name in training.batch}
    return {
        name: type for name, type in types.items()
        if type.static and len(type.dims) >= 2 and (not fed or len(type.dims) == (3 if type.dtype in FLOATS else 2))
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tokens:
    """A batch of ``samples`` sequences of ``length`` tokens. Dimension ``dim`` is sharded into ``sizes`` inside each of
    ``runs``, the parts of another axis.

    ``fed``: the batch itself is sharded, and so is every value by default. ``heads``: products of two such values are
    sharded by heads. ``more``: sequences of further lengths in values.
    """

    samples: int
    length: int
    sizes: tuple[int, ...]
    runs: int = 1
    dim: int = 1
    fed: bool = False
    heads: bool = False
    more: tuple[Tokens, ...] = ()

    @classmethod
    def of(
        cls, training: TrainingGraph, members: int, rule: Sizes, *, runs: int = 1, dim: int = 1, fed: bool = False,
        heads: bool = False,
    ) -> Tokens | None:  # fmt: skip
        """Return the tokens of the batch: of its first input of two or more dimensions. None where no input has tokens,
        they are too few, or they do not divide evenly inside ``runs``. With ``fed``, only integers of two dimensions
        and floats of three count as tokens."""
        for type in inputs_of_tokens(training, fed).values():
            if type.dims[dim] >= members * runs:
                sizes = part_sizes(type.dims[dim] // runs, members, rule)
                if runs > 1 and (type.dims[dim] % runs or len(set(sizes)) > 1):
                    return None
                return cls(type.dims[0], type.dims[1], sizes, runs, dim, fed, heads)
        return None

    @classmethod
    def streams(cls, forward: Forward, members: int, rule: Sizes) -> Tokens | None:
        """Return the tokens that products with weights read: of the streams of an encoder and a decoder, or an image's
        patches; None where they are too few everywhere."""
        unique: dict[tuple[int, int], None] = {}
        for node in forward.nodes:
            for weight, operand in forward.weighed(node) if node.is_in(PRODUCTS) else ():
                dims = forward.unflattened(node.inputs[operand])
                one = len(forward.unflattened(node.inputs[weight])) == 2  # not a matrix for each expert
                if one and len(dims) == 3 and dims[1] >= members:
                    unique[dims[0], dims[1]] = None
        streams = [cls(*pair, part_sizes(pair[1], members, rule)) for pair in unique]
        return replace(streams[0], more=tuple(streams[1:])) if streams else None

    def batch(self, type: TensorType) -> Shard | None:
        """Return the shard of a batch input; None if it has no such dimension."""
        if not type.static or len(type.dims) <= self.dim or type.dims[: self.dim + 1] != self._shape:
            return None
        return Shard(self.dim, self.sizes, self.runs)

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.samples, self.length)[: self.dim + 1]

    def shard(self, type: TensorType) -> Shard | None:
        """Return the shard of a value by tokens; None if it has no dimension of tokens."""
        return next((shard for stream in (self, *self.more) if (shard := stream._own(type)) is not None), None)

    def _own(self, type: TensorType) -> Shard | None:
        if not type.static or len(type.dims) < 2 or type.elements <= self.samples * self.length:
            return None
        if type.dims[:2] == (self.samples, self.length) and len(type.dims) > 2:
            return Shard(self.dim, self.sizes, self.runs)
        if type.dims[0] == self.samples * self.length:
            if self.dim == 0:
                return Shard(0, tuple(size * self.length for size in self.sizes), self.runs)
            return Shard(0, self.sizes, self.samples * self.runs)
        return None

    def shards(self, type: TensorType, before: Placement, placements: Sequence[Placement]) -> list[Shard]:
        """Return placements by tokens or heads for a value that would be gathered or summed otherwise.

        Partial sums: by tokens; where the batch itself is sharded, any dimension of the length counts. A shard: by
        tokens, or by heads in front of the last two dimensions. ``placements``: those along other axes, whose parts
        are divided further.
        """
        if isinstance(before, Partial) and before.op in ("sum", "mean"):
            return self._by_tokens(type)
        if not self.fed or not isinstance(before, Shard):
            return []
        shard = self.shard(type)
        return [*([shard] if shard is not None else ()), *(self._by_heads(type, placements) if self.heads else ())]

    def _by_tokens(self, type: TensorType) -> list[Shard]:
        shard = self.shard(type)
        if shard is not None:
            return [shard]
        if not self.fed or not type.static:
            return []
        length = self._shape[-1]
        return [Shard(dim, self.sizes, self.runs) for dim, size in enumerate(type.dims) if size == length]

    def _by_heads(self, type: TensorType, placements: Sequence[Placement]) -> list[Shard]:
        shards: list[Shard] = []
        if not type.static or len(type.dims) < 3:
            return shards
        members = len(self.sizes)
        for dim, size in enumerate(type.dims[:-2]):
            runs = self.samples if dim == 0 and len(type.dims) == 3 else 1
            inside = [part.runs * len(part.sizes) for part in placements if isinstance(part, Shard) and part.dim == dim]
            runs = max([runs, *inside])
            if (dim or runs > 1) and size >= runs * members and size % (runs * members) == 0:
                shards.append(Shard(dim, (size // runs // members,) * members, runs))
        return shards
