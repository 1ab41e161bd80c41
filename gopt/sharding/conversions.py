"""Region mappings: how a value of one placement becomes that of another along one axis, what it costs, and its dual.

=====================  =====================================  ====================================
from -> to             call                                   dual (of what flows back)
=====================  =====================================  ====================================
partial -> replicated  AllReduce                              nothing: the gradient is replicated
partial -> shard       ReduceScatter                          AllGather
shard -> replicated    AllGather                              ReduceScatter, or own part
replicated -> shard    own part, nothing is sent              AllGather
shard -> other shard   AllToAll                               AllToAll
=====================  =====================================  ====================================

A dual is no record of its own: backward is part of the graph, and propagation finds the mapping that it needs there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gopt.sharding.placements import Partial, Placement, Replicated, Shard


class Mapping(str, Enum):
    """The region mappings, by what is sent."""

    NOTHING = "nothing"
    REDUCE = "reduce from region"
    REDUCE_SCATTER = "reduce-scatter to region"
    GATHER = "gather from region"
    SCATTER = "scatter to region"
    TRANSPOSE = "transpose"


@dataclass(frozen=True, slots=True)
class Conversion:
    """One mapping of a value along one axis."""

    before: Placement
    after: Placement

    @property
    def mapping(self) -> Mapping | None:
        """Which mapping it is; None where there is none: a value that is replicated has no terms."""
        before, after = self.before, self.after
        if before == after:
            return Mapping.NOTHING
        if isinstance(before, Partial):
            known = {Replicated: Mapping.REDUCE, Shard: Mapping.REDUCE_SCATTER}
            return known.get(type(after)) if isinstance(after, (Replicated, Shard)) else None
        if isinstance(before, Shard):
            if isinstance(after, Replicated):
                return Mapping.GATHER
            return Mapping.TRANSPOSE if isinstance(after, Shard) else None
        if isinstance(before, Replicated) and isinstance(after, Shard):
            return Mapping.SCATTER
        return None

    @property
    def _across(self) -> bool:
        """Whether a shard goes to another dimension; along its own it is gathered and cut."""
        before, after = self.before, self.after
        return isinstance(before, Shard) and isinstance(after, Shard) and before.dim != after.dim

    def sent(self, nbytes: int, members: int) -> float:
        """Bytes that a member sends on a ring, of a whole value of ``nbytes``; infinite where there is no mapping."""
        part = (members - 1) / members * nbytes
        mapping = self.mapping
        if mapping is None:
            return float("inf")
        return {
            Mapping.NOTHING: 0.0,
            Mapping.SCATTER: 0.0,
            Mapping.REDUCE: 2 * part,
            Mapping.REDUCE_SCATTER: part,
            Mapping.GATHER: part,
            Mapping.TRANSPOSE: part / members if self._across else part,
        }[mapping]
