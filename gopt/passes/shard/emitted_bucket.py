"""Results of emitting a bucket, combined by the pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.passes.shard.gradient_reduction import ReducedGradients
from gopt.passes.shard.parameter_gather import GatherBucket
from gopt.passes.shard.scalar_reductions import PartialScalar
from gopt.spmd.program import ShardedState


@dataclass(slots=True)
class EmittedBucket:
    """Result of emitting a bucket.

    ``states``: the sharding of each source state. ``layout``: the order in which values are stored. ``parameters``: the
    parameters to gather; None if every rank updates them."""

    states: dict[str, ShardedState] = field(default_factory=dict)
    layout: list[tuple[str, ...]] = field(default_factory=list)
    reduced: ReducedGradients = field(default_factory=ReducedGradients)
    scalars: list[PartialScalar] = field(default_factory=list)
    parameters: GatherBucket | None = None
