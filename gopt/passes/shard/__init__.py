"""Shard the optimizer states, gradients, updates and parameters of a step (ZeRO stages 0 to 3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from gopt.analysis.cones import find_updates
from gopt.analysis.loss_reduction import LossReduction
from gopt.analysis.spmd import Step
from gopt.analysis.training import Phase
from gopt.analysis.updates import Cone, Mode
from gopt.graph.edit import Draft
from gopt.passes.base import Pass
from gopt.passes.shard.delivery import Delivery
from gopt.passes.shard.layout import Groups
from gopt.passes.shard.options import Options, Stage, check, layout_of
from gopt.passes.shard.plan import ReplicatedBucket, SplitBucket, Style, WholeBucket, make_plan
from gopt.passes.shard.reduction import Reduction
from gopt.passes.shard.scalars import Scalars
from gopt.passes.shard.shared import share
from gopt.passes.shard.split import Emitted, emit_split
from gopt.passes.shard.weights import Weights
from gopt.passes.shard.whole import emit_replicated, emit_whole
from gopt.report import Change


def shard(step: Step, options: Options) -> Change:
    """Reduce the gradients; share the updates and states out among the ranks; gather the new parameters.

    Requires: roles recovered, no sharding yet. Guarantees: each element is updated by exactly one member of the
    group, or by all from equal inputs. On the wire, per rank and step, B bytes of gradients and P of parameters:
    stage 0 sends 2(N-1)/N·B; stages 1 and 2 send (N-1)/N·(B + P), and one scalar call per dependency level; stage 3
    sends (N-1)/N·(B + 2P), or (B + P) when the backward reads what the forward gathered. With K micro-steps an update,
    stage 2 and up scatter gradients in each of them; all else travels once.
    """
    check(step, options)
    step.loss_reduction = LossReduction.parse(options.loss_reduction)
    step.loss_reduction.check(step.training)
    data = step.mesh.data_group
    if (data is None or step.mesh.size(data) == 1) and step.micro_steps == 1:
        return Change(note="one rank sees all the data: nothing to reduce or share out")
    training = step.training
    uncut = options.style is Style.BROADCAST
    updates = find_updates(training, whole_accumulators=options.stage is Stage.STATES, uncut=uncut)
    if options.stage is Stage.NONE or step.members == 1:
        updates = updates.replicated("stage 0" if options.stage is Stage.NONE else "no axis shards the states")
    layout = layout_of(step, options)
    draft = Draft(step.graph, "shard")
    scalars = Scalars(draft, training.graph, updates, step.group)
    wire = options.reduce_dtype.value if options.reduce_dtype is not None else ""
    groups = Groups(step.group, step.outer, data if data is not None and step.mesh.size(data) > 1 else None)
    weights = Weights(step, draft, groups.data)
    reduction = Reduction(step, draft, groups, wire, options.stage >= Stage.GRADIENTS, weights)
    before_use = options.stage is Stage.PARAMETERS
    delivery = Delivery(step, draft, step.group, before_use, options.reshard_after_forward, options.persist)
    plan = make_plan(training, updates, layout, delivery.copies)
    emitted = [_emit(draft, bucket, options.style, scalars, reduction, delivery) for bucket in plan.buckets]
    facts = delivery.finish() | scalars.finish()
    _read_reduced(step, draft, reduction)
    share(step, draft, groups.data)
    draft.finish()
    _hold(step, emitted, delivery.dropped, reduction.reduced)
    modes = Counter(cone.mode.value for cone in updates.cones.values())
    facts |= {"bucket_cap_bytes": plan.cap, "parameters": dict(sorted(modes.items()))}
    facts["buckets"] = [_describe(step, bucket) for bucket in plan.buckets]
    return Change(removed=draft.reasons, facts=facts)


def _emit(
    draft: Draft, bucket: object, style: Style, scalars: Scalars, reduction: Reduction, delivery: Delivery
) -> Emitted:
    if isinstance(bucket, SplitBucket):
        return emit_split(draft, bucket, scalars, reduction, delivery)
    if isinstance(bucket, WholeBucket):
        return emit_whole(draft, bucket, style, scalars, reduction, delivery)
    assert isinstance(bucket, ReplicatedBucket)
    emit_replicated(bucket, reduction)
    return Emitted()


def _hold(step: Step, emitted: list[Emitted], dropped: set[str], reduced: Mapping[str, str]) -> None:
    """Let the step know what the ranks hold now, and in which order it is stored.

    A state that keeps a gradient keeps it ``reduced``: its update is replicated (``cones``).
    """
    holdings = {name: holding for each in emitted for name, holding in each.holdings.items()}
    shown = (replace(held, output=reduced.get(held.output, held.output)) for held in step.holdings)
    kept = (holdings.get(held.input, held) for held in shown if held.input not in dropped)
    step.layout = [names for each in emitted for names in each.layout]
    step.hold(list({id(holding): holding for holding in kept}.values()))  # one of a class stands for many states


def _read_reduced(step: Step, draft: Draft, reduction: Reduction) -> None:
    """Only readers in the update see the reduced gradient: the backward keeps the local one."""
    for node in step.training.graph.nodes:
        if node.phase is Phase.UPDATE and (kept := draft.kept(node)) is not None:
            kept.inputs = [reduction.reduced.get(name, name) for name in kept.inputs]
            if kept.is_a("Cast"):  # a cast need not start from what was rounded to the gradient's type
                kept.inputs = [reduction.exact.get(name, name) for name in kept.inputs]


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


def needed(step: Step) -> str:
    """Why a step cannot do without this pass."""
    if step.mesh.data_ranks > 1:
        return f"{step.mesh.data_ranks} ranks see different data, and nothing else reduces their gradients"
    if step.micro_steps > 1:
        return f"nothing else sums the gradients of {step.micro_steps} micro-steps"
    return ""


PASS = Pass("shard", Options, shard, after=("hoist-casts",), needed=needed)
