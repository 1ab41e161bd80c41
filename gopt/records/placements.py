"""Placements: what each member of one mesh axis holds of a value, and which members run a node.

A value has one placement per mesh axis; that tuple is its sharding. Along different axes placements are independent.
"""

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
    """Every member has a value of its own: its batch, its gradient, its random numbers."""

    def covers(self, member: int) -> bool:
        return True

    def __str__(self) -> str:
        return "each member's own"


@dataclass(frozen=True, slots=True)
class OnMember:
    """One member has the whole value; no other has it."""

    member: int

    def covers(self, member: int) -> bool:
        return member == self.member

    def __str__(self) -> str:
        return f"on member {self.member} alone"


@dataclass(frozen=True, slots=True)
class Shard:
    """Member i has ``sizes[i]`` of dimension ``dim``, one behind the other; a size may be zero.

    ``runs``: the dimension is that many runs of equal length, and a member has its part of each: of queries, keys and
    values that one weight makes, or of heads behind one another for each sample.
    """

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
        """Elements of the dimension that a member has."""
        return self.runs * self.sizes[member]

    def part(self, member: int) -> tuple[int, int]:
        """The member's range of the dimension, or of each run of it."""
        start = sum(self.sizes[:member])
        return start, start + self.sizes[member]

    def parts(self, member: int) -> tuple[tuple[int, int], ...]:
        """The member's ranges of the dimension, one for each run."""
        start, stop = self.part(member)
        run = sum(self.sizes)
        return tuple((run * number + start, run * number + stop) for number in range(self.runs))

    @property
    def alone(self) -> bool:
        """Whether one member has all of the dimension, others nothing: no reshape tells which dimension that was."""
        return len(self.sizes) > 1 and sum(size > 0 for size in self.sizes) == 1

    def fits(self, other: Shard) -> bool:
        """Return whether two axes can shard one value so: other dimensions, or each part of one is whole runs of the
        other.

        Of one dimension, parts are then equal, and a member of both axes has the elements that both parts have.
        """
        if self.dim != other.dim:
            return True
        outer, inner = sorted((self, other), key=lambda item: item.runs)
        even = len({*self.sizes}) == len({*other.sizes}) == 1 and self.length == other.length
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
        """Elements of the dimension that a member has."""
        start, stop = self.ranges[member]
        return stop - start

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of places of each member."""
        return tuple(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Window(_Places):
    """Member i has places ``ranges[i]`` of dimension ``dim``, as read by an operator that slides along it.

    Ranges of neighbours overlap, and may omit places that are never read.

    ``length``: elements of the whole dimension. A place before 0 or at ``length`` and above is filled according to
    ``border``: zeros, or the lowest value of the type. So no member pads the dimension, not even at its ends.
    """

    border: str = "zeros"

    def __str__(self) -> str:
        return f"windows {[list(item) for item in self.ranges]} of dimension {self.dim} with {self.border} beside it"


@dataclass(frozen=True, slots=True)
class WindowTerms(_Places):
    """The dual of a ``Window``: member i has terms of a sum for places ``ranges[i]``.

    A place that no member has is zero; terms for places outside 0 to ``length`` are discarded.
    """

    def __str__(self) -> str:
        return f"terms of a sum for places {[list(item) for item in self.ranges]} of dimension {self.dim}"


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Elements ``[start, stop)`` of a flat bucket, of which member i has those in ``[cuts[i], cuts[i+1])``: 1-D."""

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
        """Elements that the member has."""
        start, stop = self.part(member)
        return max(stop - start, 0)

    @property
    def holder(self) -> int | None:
        """The one member that has all elements; None where several have some, or there are none."""
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
        """Whole tensors one behind the other, each on a member of ``count``; None where members are out of order."""
        if any(first > second for first, second in pairwise(members)):
            return None
        held = [0] * count
        for member, size in zip(members, sizes):
            held[member] += size
        return cls.whole((0, *accumulate(held)))

    def __str__(self) -> str:
        return f"elements {self.start} to {self.stop} of a bucket cut at {list(self.cuts)}"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is ``op`` over what the members have. ``on``: only members that it covers have a term.

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
    """Every member has the number of members that set a flag. The value is the flag: whether that is more than zero."""

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
    """Placements by mesh axis: of a state, what ranks hold of it; of a node, which ranks run it and on what.

    Along an axis that is not listed it is replicated. At most one placement is a FlatShard: a bucket is one list of
    elements. Shards of one dimension fit each other.
    """

    by_axis: tuple[tuple[str, Placement], ...] = ()

    @classmethod
    def along(cls, axis: str, place: Placement) -> Sharding:
        """Placed along one axis, replicated along all others."""
        return FULLY_REPLICATED if isinstance(place, Replicated) else cls(((axis, place),))

    def on(self, axis: str) -> Placement:
        """The placement along an axis."""
        return next((position for name, position in self.by_axis if name == axis), REPLICATED)

    def covers(self, coordinates: Mapping[str, int]) -> bool:
        """Return whether a rank has some of it; ``coordinates``: the rank's index by axis."""
        return all(position.covers(coordinates[axis]) for axis, position in self.by_axis)

    @property
    def flat(self) -> tuple[str, FlatShard] | None:
        """The axis that shares out elements of a bucket, and how; None where tensors are whole."""
        return next(((axis, position) for axis, position in self.by_axis if isinstance(position, FlatShard)), None)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """The axes whose members hold different parts."""
        return tuple(axis for axis, position in self.by_axis if isinstance(position, (FlatShard, *PARTS)))

    def part(self, coordinates: Mapping[str, int]) -> tuple[int, int]:
        """A rank's elements of the bucket; empty when start >= stop. Only for a sharding that is ``flat``."""
        assert self.flat is not None
        axis, position = self.flat
        return position.part(coordinates[axis])

    def local_shape(self, shape: tuple[int, ...], coordinates: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that a rank has of a value whose logical shape is ``shape``."""
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
    """The one member that has all of a value; None where several have some of it."""
    if isinstance(placement, OnMember):
        return placement.member
    return placement.holder if isinstance(placement, FlatShard) else None
