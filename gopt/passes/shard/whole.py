"""Emit whole and replicated buckets: updates that run as they stand, on their owner or on every rank."""

from __future__ import annotations

from gopt.analysis.cones import Cone
from gopt.analysis.spmd import Holding, Part
from gopt.graph.edit import Draft
from gopt.graph.place import Owner, Span
from gopt.graph.types import TensorType
from gopt.passes.shard import layout
from gopt.passes.shard.delivery import Delivery
from gopt.passes.shard.delivery import Part as Delivered
from gopt.passes.shard.plan import ReplicatedBucket, WholeBucket
from gopt.passes.shard.scalars import Scalars
from gopt.passes.shard.split import Emitted


def emit_replicated(draft: Draft, bucket: ReplicatedBucket, groups: layout.Groups, reduced: dict[str, str]) -> None:
    """Reduce the gradients of a bucket on every rank; the updates stay as they are."""
    gradients = [cone.gradient for cone in bucket.cones]
    reduced.update(layout.reduce_whole(draft, groups, bucket.name, gradients))


def emit_whole(
    draft: Draft,
    bucket: WholeBucket,
    groups: layout.Groups,
    scalars: Scalars,
    reduced: dict[str, str],
    delivery: Delivery,
) -> Emitted:
    """Scatter whole gradients to their owners, run each update there, gather the new parameters."""
    types = draft.graph.types
    out = Emitted()
    gradients = [cone.gradient for cone in bucket.cones]
    shard = layout.named(bucket.name, "gradient")
    if any(cone.whole_gradient for cone in bucket.cones):
        reduced.update(layout.reduce_whole(draft, groups, bucket.name, gradients))
    else:
        layout.reduce_shard(draft, groups, gradients, bucket.cuts, shard)
    parts = []
    for place, (cone, owner) in enumerate(zip(bucket.cones, bucket.owners)):
        span = Span(bucket.cuts, bucket.offsets[place], bucket.offsets[place + 1])
        if cone.gradient not in reduced:
            reduced[cone.gradient] = _unpack(draft, bucket, place, cone, shard, span, scalars)
        owned = delivery.owned(cone)
        part, parameter = _place(draft, bucket, place, cone, owner, scalars, owned)
        parts.append(part)
        for state in cone.states[0 if owned else 1 :]:
            input = parameter if state is cone.parameter else state.tensor
            held = Part(state.tensor, 0, types[state.tensor].elements)
            out.holdings[state.tensor] = Holding(input, state.updated, types[state.tensor].dtype, (held,), Owner(owner))
            out.layout.append((state.tensor,))
    delivery.deliver(bucket.name, bucket.cuts, bucket.cones, parts)
    if not delivery.owned(bucket.cones[0]):
        out.layout.insert(0, tuple(cone.parameter.tensor for cone in bucket.cones))
    return out


def _unpack(draft: Draft, bucket: WholeBucket, place: int, cone: Cone, shard: str, span: Span, scalars: Scalars) -> str:
    type = draft.graph.types[cone.gradient]
    flat = layout.named(bucket.name, f"flat{place}")
    layout.segment(draft, shard, span, flat, type.dtype)
    whole = layout.named(bucket.name, f"gradient{place}")
    shape = scalars.constant("shape" + "_".join(map(str, type.dims)), list(type.dims))
    draft.add("Reshape", [flat, shape], {whole: type}, place=span)
    return whole


def _place(
    draft: Draft, bucket: WholeBucket, place: int, cone: Cone, owner: int, scalars: Scalars, owned: bool
) -> tuple[Delivered, str]:
    """Put the source's own nodes on the owner; returns the flat new parameter."""
    for node in cone.nodes:
        draft.own(node).place = Owner(owner)
        draft.explain(node, f"{bucket.name}: {cone.parameter.tensor} is updated by its owner alone; {cone.why}")
    for number, node in enumerate(cone.reductions):
        name = node.outputs[0]
        share = layout.named(bucket.name, f"share{place}_{number}")
        _rename(draft, cone, name, share)
        if draft.graph.types[share].dims:
            scalar = f"{share}.scalar"
            empty = scalars.constant("shape", [])
            draft.add(
                "Reshape", [share, empty], {scalar: TensorType(draft.graph.types[share].dtype, ())}, place=Owner(owner)
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
    one = scalars.constant("one", [-1])
    names = [layout.named(bucket.name, f"{role}{place}_flat") for role in ("parameter", "updated")]
    for source, name in zip((parameter, updated), names):
        draft.add("Reshape", [source, one], {name: layout.flat(type.dtype)}, place=Owner(owner))
    return Delivered(names[0], names[1], Owner(owner)), parameter


def _rename(draft: Draft, cone: Cone, old: str, new: str) -> None:
    """Give a value that a cone makes another name, inside the cone."""
    for node in map(draft.own, cone.nodes):
        if old in node.outputs:
            draft.rename_output(node, old, new)
        draft.rewire(node, old, new)
