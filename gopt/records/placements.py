"""Placements: the part of a value on each member of a mesh axis, and the members that run a node.

A value has one placement per mesh axis; this tuple is the value's sharding. Along different axes placements are
independent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every member has the same value."""

    def covers(self, member: int) -> bool:
        return True

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class PerMember:
    """Every member has a different value: a batch, a gradient, random numbers."""

    def covers(self, member: int) -> bool:
        return True

    def __str__(self) -> str:
        return "each member's own"


@dataclass(frozen=True, slots=True)
class OnMember:
    """One member has the whole value, all others nothing."""

    member: int

    def covers(self, member: int) -> bool:
        return member == self.member

    def __str__(self) -> str:
        return f"on member {self.member} alone"


@dataclass(frozen=True, slots=True)
class Shard:
    """Member i has ``sizes[i]`` of dimension ``dim``, one behind the other; a size may be zero.

    ``runs``: the dimension is so many runs of equal length, with a part of each on every member: of queries, keys and
    values from one weight, or of heads behind one another for each sample."""

    dim: int
    sizes: tuple[int, ...]
    runs: int = 1

    def covers(self, member: int) -> bool:
        return True

    @property
    def length(self) -> int:
        """Elements of the whole dimension."""
        return self.runs * sum(self.sizes)

    def local(self, member: int) -> int:
        """Elements of the dimension on a member."""
        return self.runs * self.sizes[member]

    def part(self, member: int) -> tuple[int, int]:
        """The member's range of the dimension, or of each run."""
        start = sum(self.sizes[:member])
        return start, start + self.sizes[member]

    def parts(self, member: int) -> tuple[tuple[int, int], ...]:
        """The member's ranges of the dimension, one for each run."""
        start, stop = self.part(member)
        run = sum(self.sizes)
        return tuple((run * number + start, run * number + stop) for number in range(self.runs))

    @property
    def alone(self) -> bool:
        """Whether one member has all of the dimension, others nothing: no reshape tells this dimension."""
        return len(self.sizes) > 1 and sum(size > 0 for size in self.sizes) == 1

    def fits(self, shard: Shard) -> bool:
        """Return whether two axes can shard one value so: other dimensions, or parts of one made of whole runs of the
        other.

        Of one dimension, parts are then equal, and a member of both axes has the elements common to both parts."""
        if self.dim != shard.dim:
            return True
        outer, inner = sorted((self, shard), key=lambda item: item.runs)
        even = len({*self.sizes}) == len({*shard.sizes}) == 1 and self.length == shard.length
        return even and inner.runs % (outer.runs * len(outer.sizes)) == 0

    def __str__(self) -> str:
        item = f" of each of {self.runs} runs" if self.runs > 1 else ""
        return f"sharded along dimension {self.dim} in {list(self.sizes)}{item}"


Ranges = tuple[tuple[int, int], ...]
"""For each member, the first place of a dimension and the one after the last."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Places ``ranges[i]`` of dimension ``dim`` for member i; ``length``: elements of the whole dimension."""

    dim: int
    ranges: Ranges
    length: int

    def covers(self, member: int) -> bool:
        return True

    def local(self, member: int) -> int:
        """Elements of the dimension on a member."""
        start, stop = self.ranges[member]
        return stop - start

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of places of each member."""
        return tuple(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Window(_Places):
    """Member i has places ``ranges[i]`` of dimension ``dim``, as read by a sliding operator.

    Ranges of neighbours overlap, and may omit places that are never read.

    ``length``: elements of the whole dimension. A place before 0 or at ``length`` and above is filled according to
    ``border``: zeros, or the lowest value of the type. So no member pads the dimension, not even at the ends."""

    border: str = "zeros"

    def __str__(self) -> str:
        return f"windows {[list(item) for item in self.ranges]} of dimension {self.dim} with {self.border} beside it"


@dataclass(frozen=True, slots=True)
class WindowTerms(_Places):
    """The dual of a ``Window``: member i has terms of a sum for places ``ranges[i]``.

    A place without a member is zero; terms for places outside 0 to ``length`` are discarded."""

    def __str__(self) -> str:
        return f"terms of a sum for places {[list(item) for item in self.ranges]} of dimension {self.dim}"


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements ``[start, stop)`` of a flat bucket, with ``[cuts[i], cuts[i+1])`` on member i: 1-D."""

    cuts: tuple[int, ...]
    start: int
    stop: int

    def part(self, member: int) -> tuple[int, int]:
        """The member's elements, in bucket offsets; empty when start >= stop."""
        return max(self.start, self.cuts[member]), min(self.stop, self.cuts[member + 1])

    def covers(self, member: int) -> bool:
        start, stop = self.part(member)
        return start < stop

    def length(self, member: int) -> int:
        """Elements on the member."""
        start, stop = self.part(member)
        return max(stop - start, 0)

    @property
    def holder(self) -> int | None:
        """The only member with elements; None for several such members, or without elements."""
        if self.start >= self.stop:
            return None
        member = bisect_right(self.cuts, self.start) - 1
        return member if self.stop <= self.cuts[member + 1] else None

    @classmethod
    def whole(cls, cuts: tuple[int, ...]) -> FlatShard:
        """All of a bucket."""
        return cls(cuts, 0, cuts[-1])

    @classmethod
    def joined(cls, members: tuple[int, ...], sizes: tuple[int, ...], count: int) -> FlatShard | None:
        """Whole tensors in a row, each on a member of ``count``; None for members out of order."""
        if any(before > second for before, second in pairwise(members)):
            return None
        lengths = [0] * count
        for member, size in zip(members, sizes):
            lengths[member] += size
        return cls.whole((0, *accumulate(lengths)))

    def __str__(self) -> str:
        return f"elements {self.start} to {self.stop} of a bucket cut at {list(self.cuts)}"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is ``op`` over the members' terms. ``on``: only covered members have a term.

    ``op``: sum, mean, max, min, any, all; or count: of flags as numbers, whose sum is a ``FlagCount``.
    """

    op: str
    on: FlatShard | OnMember | None = None

    def covers(self, member: int) -> bool:
        return self.on is None or self.on.covers(member)

    def __str__(self) -> str:
        return f"a partial {self.op}"


@dataclass(frozen=True, slots=True)
class FlagCount:
    """Every member has the number of members with a set flag. The value is the flag: whether this number is above
    zero."""

    def covers(self, member: int) -> bool:
        return True

    def __str__(self) -> str:
        return "the number of members that set a flag"


Part: TypeAlias = Shard | Window | WindowTerms
"""Members have some of a dimension: a part, or a window of it."""
PARTS = (Shard, Window, WindowTerms)
Placement: TypeAlias = Replicated | PerMember | OnMember | Part | FlatShard | Partial | FlagCount
Place: TypeAlias = Replicated | OnMember | FlatShard
"""Members that run a node along an axis: all, one, or those with elements of a part of a bucket."""
Placements: TypeAlias = tuple[Placement, ...]
"""One placement per axis of the mesh that has several members, in mesh order."""
REPLICATED = Replicated()
PER_MEMBER = PerMember()
FLAG_COUNT = FlagCount()


@dataclass(frozen=True, slots=True)
class Sharding:
    """Placements by mesh axis: of a state, the ranks' parts; of a node, the running ranks and their parts.

    Along an unlisted axis the value is replicated. At most one placement is a FlatShard: a bucket is one list of
    elements. Shards of one dimension fit each other."""

    by_axis: tuple[tuple[str, Placement], ...] = ()

    @classmethod
    def along(cls, axis: str, placement: Placement) -> Sharding:
        """Placed along one axis, replicated along all others."""
        return FULLY_REPLICATED if isinstance(placement, Replicated) else cls(((axis, placement),))

    def on(self, axis: str) -> Placement:
        """The placement along an axis."""
        return next((position for name, position in self.by_axis if name == axis), REPLICATED)

    def covers(self, coordinates: Mapping[str, int]) -> bool:
        """Return whether a rank has elements of the value; ``coordinates``: the rank's index by axis."""
        return all(position.covers(coordinates[axis]) for axis, position in self.by_axis)

    @property
    def flat(self) -> tuple[str, FlatShard] | None:
        """The axis of a shared-out bucket, and the placement; None for whole tensors."""
        return next(((axis, position) for axis, position in self.by_axis if isinstance(position, FlatShard)), None)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """The axes with different parts on their members."""
        return tuple(axis for axis, position in self.by_axis if isinstance(position, (FlatShard, *PARTS)))

    def part(self, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """A rank's elements of the bucket; empty when start >= stop. Only for a ``flat`` sharding."""
        assert self.flat is not None
        axis, position = self.flat
        return position.part(coordinates[axis])

    def local_shape(self, shape: tuple[int, ...], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """A rank's shape of a value with logical shape ``shape``."""
        for axis, position in self.by_axis:
            if isinstance(position, FlatShard):
                shape = (position.length(coordinates[axis]),)
            elif isinstance(position, Shard) and position.length:
                local = shape[position.dim] * position.local(coordinates[axis]) // position.length
                shape = (*shape[: position.dim], local, *shape[position.dim + 1 :])
            elif isinstance(position, (Window, WindowTerms)):
                shape = (*shape[: position.dim], position.local(coordinates[axis]), *shape[position.dim + 1 :])
        return shape

    def __str__(self) -> str:
        return ", ".join(f"{position} along {axis}" for axis, position in self.by_axis) or str(REPLICATED)


FULLY_REPLICATED = Sharding()


def holder(placement: Placement) -> int | None:
    """The member with all of a value; None for several."""
    if isinstance(placement, OnMember):
        return placement.member
    return placement.holder if isinstance(placement, FlatShard) else None
