"""Region mappings: the call that turns one placement of a value into another along an axis, its cost and its dual.

| from -> to               | call                               | dual, of the gradient               |
|--------------------------|------------------------------------|-------------------------------------|
| partial -> replicated    | AllReduce                          | nothing: the gradient is replicated |
| partial -> shard         | ReduceScatter                      | AllGather                           |
| shard -> replicated      | AllGather                          | ReduceScatter, or own part          |
| replicated -> shard      | own part, nothing is sent          | AllGather                           |
| shard -> other shard     | AllToAll                           | AllToAll                            |
| shard -> window          | halo exchange: AllGather of strips | halo sum                            |
| window terms -> shard    | halo sum: AllGather of strips      | halo exchange                       |
| replicated -> window     | own window, nothing is sent        | halo sum                            |

A dual has no record: the backward is part of the graph, and propagation finds the mapping that the backward needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from gopt.records.placements import Partial, Placement, Replicated, Shard, Window, WindowTerms
from gopt.spmd.halo import Halo


class MappingKind(str, Enum):
    """The region mappings, by what is sent."""

    NOTHING = "nothing"
    REDUCE = "reduce from region"
    REDUCE_SCATTER = "reduce-scatter to region"
    GATHER = "gather from region"
    SCATTER = "scatter to region"
    TRANSPOSE = "transpose"
    HALO_EXCHANGE = "halo exchange"
    HALO_SUM = "halo sum"


@dataclass(frozen=True, slots=True)
class Conversion:
    """One mapping of a value along an axis."""

    before: Placement
    after: Placement

    @property
    def mapping(self) -> MappingKind | None:
        """The region mapping of the conversion; None if no mapping exists: a replicated value has no terms."""
        before, after = self.before, self.after
        if before == after:
            return MappingKind.NOTHING
        if isinstance(before, Partial):
            terms: dict[type[Placement], MappingKind] = {
                Replicated: MappingKind.REDUCE,
                Shard: MappingKind.REDUCE_SCATTER,
            }
            return terms.get(type(after))
        if self.halo is not None:
            kinds = {"exchange": MappingKind.HALO_EXCHANGE, "sum": MappingKind.HALO_SUM, "cut": MappingKind.SCATTER}
            return kinds[self.halo.kind]
        if isinstance(before, Shard):
            if isinstance(after, Replicated):
                return MappingKind.GATHER
            return MappingKind.TRANSPOSE if isinstance(after, Shard) else None
        if isinstance(before, Replicated) and isinstance(after, Shard):
            return MappingKind.SCATTER
        return None

    @property
    def halo(self) -> Halo | None:
        """The parts and windows the halo exchange connects; None for a mapping without windows.

        A resharded dimension is a halo as well, with each member's new part as window.
        """
        return _halo(self.before, self.after)

    @property
    def _across(self) -> bool:
        """Return whether a shard moves to another dimension; otherwise a shard with runs is gathered and cut."""
        before, after = self.before, self.after
        return isinstance(before, Shard) and isinstance(after, Shard) and before.dim != after.dim

    def sent(self, nbytes: int, members: int) -> float:
        """Bytes a member sends on a ring, of a whole value of ``nbytes``; infinite without a mapping."""
        part = (members - 1) / members * nbytes
        mapping = self.mapping
        if mapping is None:
            return float("inf")
        halo = self.halo
        if halo is not None:
            return halo.sends / max(halo.length, 1) * nbytes
        return {
            MappingKind.NOTHING: 0.0,
            MappingKind.SCATTER: 0.0,
            MappingKind.REDUCE: 2 * part,
            MappingKind.REDUCE_SCATTER: part,
            MappingKind.GATHER: part,
            MappingKind.TRANSPOSE: part / members if self._across else part,
        }[mapping]


@lru_cache(4096)
def _halo(before: Placement, after: Placement) -> Halo | None:
    if isinstance(before, Shard) and isinstance(after, (Shard, Window)) and before.runs == 1:
        if before.dim != after.dim or before.length != after.length or before == after:
            return None
        if isinstance(after, Window):
            return Halo(before.sizes, after.ranges)
        return Halo(before.sizes, tuple(map(after.part, range(len(after.sizes))))) if after.runs == 1 else None
    if isinstance(before, WindowTerms) and isinstance(after, Shard) and after.runs == 1:
        alike = before.dim == after.dim and before.length == after.length
        return Halo(after.sizes, before.ranges, "sum") if alike else None
    if isinstance(before, Replicated) and isinstance(after, Window):
        return Halo((after.length,), after.ranges, "cut")
    return None
