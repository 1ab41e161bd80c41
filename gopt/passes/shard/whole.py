"""Emit whole and replicated buckets: updates that run as they stand, on their owner or on every rank."""

from __future__ import annotations

from gopt.analysis.spmd import Holding, Part
from gopt.analysis.updates import Cone
from gopt.graph.edit import Draft
from gopt.graph.types import TensorType
from gopt.passes.shard import layout
from gopt.passes.shard.delivery import Delivery, Parcel
from gopt.passes.shard.delivery import Part as Delivered
from gopt.passes.shard.plan import ReplicatedBucket, Style, WholeBucket
from gopt.passes.shard.reduction import Reduction
from gopt.passes.shard.scalars import Scalars
from gopt.passes.shard.split import Emitted
from gopt.sharding.placements import FlatShard, OnMember


def emit_replicated(bucket: ReplicatedBucket, reduction: Reduction) -> None:
    """Reduce the gradients of a bucket on every rank; the updates stay as they are."""
    reduction.everywhere(bucket.name, [cone.gradient for cone in bucket.cones])


def emit_whole(
    draft: Draft, bucket: WholeBucket, style: Style, scalars: Scalars, reduction: Reduction, delivery: Delivery
) -> Emitted:
    """Bring whole gradients to their owners, run each update there, deliver the new parameters."""
    types = draft.graph.types
    out = Emitted()
    _bring(draft, bucket, style, scalars, reduction)
    parts = []
    for place, (cone, owner) in enumerate(zip(bucket.cones, bucket.owners)):
        owned = delivery.owned(cone)
        part = _place(draft, bucket, place, cone, owner, scalars, owned)
        parts.append(part if style is Style.BROADCAST else _flat(draft, bucket, place, part, scalars))
        for state in cone.states[0 if owned else 1 :]:
            input = part.current if state is cone.parameter else state.tensor
            held = Part(state.tensor, 0, types[state.tensor].elements)
            out.holdings[state.tensor] = Holding(
                input, state.updated, types[state.tensor].dtype, (held,), OnMember(owner)
            )
            out.layout.append((state.tensor,))
    cuts = None if style is Style.BROADCAST else bucket.cuts
    delivery.deliver(Parcel(bucket.name, bucket.cones, tuple(parts), cuts))
    if not delivery.owned(bucket.cones[0]):
        out.layout.insert(0, tuple(cone.parameter.tensor for cone in bucket.cones))
    return out


def _bring(draft: Draft, bucket: WholeBucket, style: Style, scalars: Scalars, reduction: Reduction) -> None:
    """Reduce each gradient to where its update runs."""
    gradients = [cone.gradient for cone in bucket.cones]
    if any(cone.whole_gradient for cone in bucket.cones):
        reduction.everywhere(bucket.name, gradients)
    elif style is Style.BROADCAST:
        reduction.to_owners(bucket.name, gradients, bucket.owners)
    else:
        shard = reduction.to_shard(bucket.name, gradients, bucket.cuts)
        exact = reduction.exact.get(shard)
        for place, cone in enumerate(bucket.cones):
            span = FlatShard(bucket.cuts, bucket.offsets[place], bucket.offsets[place + 1])
            whole = layout.named(bucket.name, f"gradient{place}")
            _unpack(draft, whole, draft.graph.types[cone.gradient], shard, span, scalars)
            reduction.reduced[cone.gradient] = whole
            if exact is not None:
                type = TensorType(draft.graph.types[exact].dtype, draft.graph.types[cone.gradient].shape)
                _unpack(draft, f"{whole}_exact", type, exact, span, scalars)
                reduction.exact[whole] = f"{whole}_exact"


def _unpack(draft: Draft, whole: str, type: TensorType, shard: str, span: FlatShard, scalars: Scalars) -> None:
    """One tensor of a bucket in its own shape, on its owner."""
    layout.segment(draft, shard, span, f"{whole}_flat", type.dtype)
    shape = scalars.constant("shape" + "_".join(map(str, type.dims)), list(type.dims))
    draft.add("Reshape", [f"{whole}_flat", shape], {whole: type}, place=span)


def _flat(draft: Draft, bucket: WholeBucket, place: int, part: Delivered, scalars: Scalars) -> Delivered:
    """An owned parameter as its run of the bucket."""
    one = scalars.constant("one", [-1])
    names = [layout.named(bucket.name, f"{role}{place}_flat") for role in ("parameter", "updated")]
    for source, name in zip((part.current, part.updated), names):
        made = {name: layout.flat(draft.graph.types[source].dtype)}
        draft.add("Reshape", [source, one], made, place=part.place)
    return Delivered(names[0], names[1], part.place, part.elements)


def _place(
    draft: Draft, bucket: WholeBucket, place: int, cone: Cone, owner: int, scalars: Scalars, owned: bool
) -> Delivered:
    """Put the source's own nodes on the owner; returns the parameter there, before and after the update."""
    for node in cone.nodes:
        draft.own(node).place = OnMember(owner)
        draft.explain(node, f"{bucket.name}: {cone.parameter.tensor} is updated by its owner alone; {cone.why}")
    for number, node in enumerate(cone.reductions):
        name = node.outputs[0]
        share = layout.named(bucket.name, f"share{place}_{number}")
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
        parameter = layout.named(bucket.name, f"parameter{place}")
        draft.graph.types[parameter] = type
        for node in map(draft.own, cone.nodes):
            draft.rewire(node, cone.parameter.tensor, parameter)
    else:
        updated = layout.named(bucket.name, f"parameter{place}_out")
        _rename(draft, cone, cone.parameter.updated, updated)
    return Delivered(parameter, updated, OnMember(owner), type.elements)


def _rename(draft: Draft, cone: Cone, old: str, new: str) -> None:
    """Give a value that a cone makes another name, inside the cone."""
    for node in map(draft.own, cone.nodes):
        if old in node.outputs:
            draft.rename_output(node, old, new)
        draft.rewire(node, old, new)
