"""Emit whole and replicated buckets: updates that run as they stand, on their owner or on every rank."""

from __future__ import annotations

from gopt.analysis.updates import Cone
from gopt.graph.edit import Draft
from gopt.graph.types import TensorType
from gopt.passes.shard import emit
from gopt.passes.shard.gradient_reduction import GradientReduction
from gopt.passes.shard.parameter_gather import GatherBucket, OwnedParameter, ParameterGather
from gopt.passes.shard.plan import ReplicatedBucket, Style, WholeBucket
from gopt.passes.shard.scalar_reductions import ScalarReductions
from gopt.passes.shard.split import Emitted
from gopt.program import BucketSlice, ShardedState
from gopt.sharding.placements import FlatShard, OnMember


def emit_replicated(bucket: ReplicatedBucket, reduction: GradientReduction) -> None:
    """Reduce the gradients of a bucket on every rank; the updates stay as they are."""
    reduction.everywhere(bucket.name, [cone.gradient for cone in bucket.cones])


def emit_whole(
    draft: Draft,
    bucket: WholeBucket,
    style: Style,
    scalars: ScalarReductions,
    reduction: GradientReduction,
    gather: ParameterGather,
) -> Emitted:
    """Bring whole gradients to their owners, run each update there, deliver the new parameters."""
    types = draft.graph.types
    out = Emitted()
    _bring(draft, bucket, style, scalars, reduction)
    parts = []
    for place, (cone, owner) in enumerate(zip(bucket.cones, bucket.owners)):
        owned = gather.owned(cone)
        part = _place(draft, bucket, place, cone, owner, scalars, owned)
        parts.append(part if style is Style.BROADCAST else _flat(draft, bucket, place, part, scalars))
        for state in cone.states[0 if owned else 1 :]:
            input = part.current if state is cone.parameter else state.tensor
            held = BucketSlice(state.tensor, 0, types[state.tensor].elements)
            out.states[state.tensor] = ShardedState(
                input, state.updated, types[state.tensor].dtype, (held,), OnMember(owner)
            )
            out.layout.append((state.tensor,))
    cuts = None if style is Style.BROADCAST else bucket.cuts
    gather.add(GatherBucket(bucket.name, bucket.cones, tuple(parts), cuts))
    if not gather.owned(bucket.cones[0]):
        out.layout.insert(0, tuple(cone.parameter.tensor for cone in bucket.cones))
    return out


def _bring(
    draft: Draft, bucket: WholeBucket, style: Style, scalars: ScalarReductions, reduction: GradientReduction
) -> None:
    """Reduce each gradient to where its update runs."""
    gradients = [cone.gradient for cone in bucket.cones]
    if any(cone.whole_gradient for cone in bucket.cones):
        reduction.everywhere(bucket.name, gradients)
    elif style is Style.BROADCAST:
        reduction.to_owners(bucket.name, gradients, bucket.owners)
    else:
        shard = reduction.to_shard(bucket.name, gradients, bucket.cuts)
        unrounded = reduction.unrounded.get(shard)
        for place, cone in enumerate(bucket.cones):
            span = FlatShard(bucket.cuts, bucket.offsets[place], bucket.offsets[place + 1])
            whole = emit.named(bucket.name, f"gradient{place}")
            _unpack(draft, whole, draft.graph.types[cone.gradient], shard, span, scalars)
            reduction.reduced[cone.gradient] = whole
            if unrounded is not None:
                type = TensorType(draft.graph.types[unrounded].dtype, draft.graph.types[cone.gradient].shape)
                _unpack(draft, f"{whole}_exact", type, unrounded, span, scalars)
                reduction.unrounded[whole] = f"{whole}_exact"


def _unpack(draft: Draft, whole: str, type: TensorType, shard: str, span: FlatShard, scalars: ScalarReductions) -> None:
    """One tensor of a bucket in its own shape, on its owner."""
    emit.shard_slice(draft, shard, span, f"{whole}_flat", type.dtype)
    shape = scalars.constant("shape" + "_".join(map(str, type.dims)), list(type.dims))
    draft.add("Reshape", [f"{whole}_flat", shape], {whole: type}, place=span)


def _flat(
    draft: Draft, bucket: WholeBucket, place: int, part: OwnedParameter, scalars: ScalarReductions
) -> OwnedParameter:
    """An owned parameter as its run of the bucket."""
    one = scalars.constant("one", [-1])
    names = [emit.named(bucket.name, f"{role}{place}_flat") for role in ("parameter", "updated")]
    for source, name in zip((part.current, part.updated), names):
        made = {name: emit.flat(draft.graph.types[source].dtype)}
        draft.add("Reshape", [source, one], made, place=part.place)
    return OwnedParameter(names[0], names[1], part.place, part.elements)


def _place(
    draft: Draft, bucket: WholeBucket, place: int, cone: Cone, owner: int, scalars: ScalarReductions, owned: bool
) -> OwnedParameter:
    """Put the source's own nodes on the owner; returns the parameter there, before and after the update."""
    for node in cone.nodes:
        draft.own(node).place = OnMember(owner)
        draft.explain(node, f"{bucket.name}: {cone.parameter.tensor} is updated by its owner alone; {cone.why}")
    for number, node in enumerate(cone.reductions):
        name = node.outputs[0]
        share = emit.named(bucket.name, f"share{place}_{number}")
        _rename(draft, cone, name, share)
        if draft.graph.types[share].dims:
            scalar = f"{share}.scalar"
            empty = scalars.constant("shape", [])
            draft.add(
                "Reshape",
                [share, empty],
                {scalar: TensorType(draft.graph.types[share].dtype, ())},
                place=OnMember(owner),
            )
            share = scalar
        scalars.share([name], share)
    type = draft.graph.types[cone.parameter.updated]
    parameter, updated = cone.parameter.tensor, cone.parameter.updated
    if owned:
        # The owner's master has a name of its own: the source's name is what every rank gathers.
        parameter = emit.named(bucket.name, f"parameter{place}")
        draft.graph.types[parameter] = type
        for node in map(draft.own, cone.nodes):
            draft.rewire(node, cone.parameter.tensor, parameter)
    else:
        updated = emit.named(bucket.name, f"parameter{place}_out")
        _rename(draft, cone, cone.parameter.updated, updated)
    return OwnedParameter(parameter, updated, OnMember(owner), type.elements)


def _rename(draft: Draft, cone: Cone, old: str, new: str) -> None:
    """Give a value that a cone makes another name, inside the cone."""
    for node in map(draft.own, cone.nodes):
        if old in node.outputs:
            draft.rename_output(node, old, new)
        draft.rewire(node, old, new)
