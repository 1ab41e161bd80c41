"""Shard the optimizer states, gradients, updates and parameters of a step (ZeRO stages 0 to 3)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum

from gopt.analysis.cones import Cone, Mode, find_updates
from gopt.analysis.partition import Partition
from gopt.analysis.spmd import Holding, Step
from gopt.analysis.training import Phase
from gopt.errors import OptionError
from gopt.graph.edit import Draft
from gopt.passes.base import Pass
from gopt.passes.shard.delivery import Delivery
from gopt.passes.shard.layout import Groups
from gopt.passes.shard.plan import ReplicatedBucket, SplitBucket, make_plan
from gopt.passes.shard.scalars import Scalars
from gopt.passes.shard.split import emit_split
from gopt.passes.shard.whole import emit_replicated, emit_whole
from gopt.report import Change


class Stage(IntEnum):
    """What is sharded (contract section 1)."""

    NONE = 0
    STATES = 1
    GRADIENTS = 2
    PARAMETERS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much is sharded, and how large a bucket may grow."""

    stage: Stage = Stage.GRADIENTS
    partition: Partition = Partition.FLAT
    bucket_mb: float | None = None
    reshard_after_forward: bool = True


def shard(step: Step, options: Options) -> Change:
    """Reduce the gradients; share the updates and states out among the ranks; gather the new parameters.

    Requires: roles recovered, no sharding yet. Guarantees: each element is updated by exactly one member of the
    group, or by all from equal inputs. On the wire, per rank and step, B bytes of gradients and P of parameters:
    stage 0 sends 2(N-1)/N·B; stages 1 and 2 send (N-1)/N·(B + P), and one scalar call per dependency level; stage 3
    sends (N-1)/N·(B + 2P), or (B + P) when the backward reads what the forward gathered.
    """
    data = step.mesh.data_group
    if data is None or step.mesh.size(data) == 1:
        return Change(note="one rank sees all the data: nothing to reduce or share out")
    if options.bucket_mb is not None and not options.bucket_mb >= 0:
        raise OptionError(f"--bucket-mb cannot be {options.bucket_mb}", "0 means one tensor a call")
    training = step.training
    updates = find_updates(training, whole_accumulators=options.stage is Stage.STATES)
    if options.stage is Stage.NONE or step.members == 1:
        why = "stage 0" if options.stage is Stage.NONE else "no axis shards the states"
        for cone in updates.cones.values():
            cone.mode, cone.why = Mode.REPLICATED, why
    groups = Groups(step.group, step.outer, data)
    draft = Draft(step.graph, "shard")
    reduced: dict[str, str] = {}
    scalars = Scalars(draft, training.graph, updates, step.group, reduced)
    cap = None if options.bucket_mb is None else int(options.bucket_mb * (1 << 20))
    stage3 = options.stage is Stage.PARAMETERS
    delivery = Delivery(step, draft, groups, stage3, options.reshard_after_forward)
    plan = make_plan(training, updates, step.members, cap, options.partition, delivery.copies)
    holdings: dict[str, Holding] = {}
    layout: list[tuple[str, ...]] = []
    for bucket in plan.buckets:
        if isinstance(bucket, ReplicatedBucket):
            emit_replicated(draft, bucket, groups, reduced)
            continue
        emit = emit_split if isinstance(bucket, SplitBucket) else emit_whole
        emitted = emit(draft, bucket, groups, scalars, reduced, delivery)  # type: ignore[arg-type]
        holdings.update(emitted.holdings)
        layout.extend(emitted.layout)
    facts = scalars.finish()
    _read_reduced(step, draft, reduced)
    draft.finish()
    kept = (holdings.get(h.input, h) for h in step.holdings if h.input not in delivery.dropped)
    step.hold(list({id(holding): holding for holding in kept}.values()))  # one of a class stands for many states
    step.layout = layout
    modes = Counter(cone.mode.value for cone in updates.cones.values())
    facts |= {"bucket_cap_bytes": plan.cap, "parameters": dict(sorted(modes.items()))}
    facts["buckets"] = [_describe(step, bucket) for bucket in plan.buckets]
    return Change(removed=draft.reasons, facts=facts)


def _read_reduced(step: Step, draft: Draft, reduced: dict[str, str]) -> None:
    """Only readers in the update see the reduced gradient: the backward keeps the local one."""
    for node, phase in zip(step.training.graph.nodes, step.training.phases):
        if phase is Phase.UPDATE and (kept := draft.kept(node)) is not None:
            kept.inputs = [reduced.get(name, name) for name in kept.inputs]


def _describe(step: Step, bucket: object) -> dict[str, object]:
    """What the report says of a bucket."""
    cones: tuple[Cone, ...] = bucket.cones  # type: ignore[attr-defined]
    types = step.training.graph.types
    row: dict[str, object] = {
        "name": bucket.name,  # type: ignore[attr-defined]
        "mode": cones[0].mode.value,
        "tensors": [cone.parameter.tensor for cone in cones],
        "bytes": sum(types[cone.gradient].nbytes for cone in cones),
        "dtype": types[cones[0].gradient].dtype,
        "closed_because": bucket.why,  # type: ignore[attr-defined]
    }
    if isinstance(bucket, SplitBucket):
        row["classes"] = len(bucket.segments)
    if cones[0].mode is not Mode.SPLIT:
        row["reasons"] = sorted({cone.why for cone in cones})
    return row


PASS = Pass("shard", Options, shard, after=("hoist-casts",))
