"""What emitting a bucket makes, for the pass to put together."""

from __future__ import annotations

from dataclasses import dataclass, field

from gopt.passes.shard.gradient_reduction import ReducedGradients
from gopt.passes.shard.parameter_gather import GatherBucket
from gopt.passes.shard.scalar_reductions import PartialScalar
from gopt.program import ShardedState


@dataclass(slots=True)
class Emitted:
    """What a bucket leaves behind.

    ``states``: how the ranks hold each source state. ``layout``: the order in which values are stored. ``parameters``:
    what is to be gathered of them; None where every rank updates them.
    """

    states: dict[str, ShardedState] = field(default_factory=dict)
    layout: list[tuple[str, ...]] = field(default_factory=list)
    reduced: ReducedGradients = field(default_factory=ReducedGradients)
    scalars: list[PartialScalar] = field(default_factory=list)
    parameters: GatherBucket | None = None
