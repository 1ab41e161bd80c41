"""Emit whole and replicated buckets: updates that run as they stand, on their owner or on every rank."""

from __future__ import annotations

from collections.abc import Mapping

from gopt.analysis.cones import Cone
from gopt.analysis.spmd import Holding, Part
from gopt.graph.edit import Draft
from gopt.graph.place import Owner, Span
from gopt.graph.types import TensorType, dtype_code
from gopt.passes.shard import layout
from gopt.passes.shard.plan import ReplicatedBucket, WholeBucket
from gopt.passes.shard.scalars import Scalars
from gopt.passes.shard.split import Emitted


def emit_replicated(draft: Draft, bucket: ReplicatedBucket, groups: layout.Groups, reduced: dict[str, str]) -> None:
    """Reduce the gradients of a bucket on every rank; the updates stay as they are."""
    gradients = [cone.gradient for cone in bucket.cones]
    names = [layout.named(bucket.name, f"gradient{place}") for place in range(len(gradients))]
    layout.all_reduce(draft, groups.data, gradients, names, "mean")
    reduced.update(zip(gradients, names))


def emit_whole(
    draft: Draft,
    bucket: WholeBucket,
    groups: layout.Groups,
    scalars: Scalars,
    reduced: dict[str, str],
    copies: Mapping[str, Holding],
) -> Emitted:
    """Scatter whole gradients to their owners, run each update there, gather the new parameters."""
    types = draft.graph.types
    out = Emitted()
    gradients = [cone.gradient for cone in bucket.cones]
    shard = layout.named(bucket.name, "gradient")
    if any(cone.whole_gradient for cone in bucket.cones):
        names = [layout.named(bucket.name, f"gradient{place}") for place in range(len(gradients))]
        layout.all_reduce(draft, groups.data, gradients, names, "mean")
        reduced.update(zip(gradients, names))
    else:
        layout.reduce_shard(draft, groups, gradients, bucket.cuts, shard)
    flat_parts = []
    for place, (cone, owner) in enumerate(zip(bucket.cones, bucket.owners)):
        span = Span(bucket.cuts, bucket.offsets[place], bucket.offsets[place + 1])
        if cone.gradient not in reduced:
            reduced[cone.gradient] = _unpack(draft, bucket, place, cone, shard, span, scalars)
        copy = copies.get(cone.parameter.tensor)
        narrow = copy.dtype if copy is not None else ""
        flat_parts.append(_place(draft, bucket, place, cone, owner, scalars, narrow))
        for state in cone.states[0 if narrow else 1 :]:
            part = Part(state.tensor, 0, types[state.tensor].elements)
            out.holdings[state.tensor] = Holding(
                state.tensor, state.updated, types[state.tensor].dtype, (part,), Owner(owner)
            )
            out.layout.append((state.tensor,))
    joined = layout.named(bucket.name, "parameters_out")
    layout.join(draft, flat_parts, joined, types[flat_parts[0]].dtype)
    layout.gather_parameters(draft, groups, joined, bucket.cuts, bucket.cones, copies)
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


def _place(draft: Draft, bucket: WholeBucket, place: int, cone: Cone, owner: int, scalars: Scalars, narrow: str) -> str:
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
        scalars.share([name], share, "")
    type = draft.graph.types[cone.parameter.updated]
    travels = layout.named(bucket.name, f"parameter{place}_out")
    if narrow:
        # The owner keeps the wide master under its own name; its cast is what the others get.
        made = {travels: TensorType(narrow, type.shape)}
        draft.add("Cast", [cone.parameter.updated], made, attributes={"to": dtype_code(narrow)}, place=Owner(owner))
    else:
        _rename(draft, cone, cone.parameter.updated, travels)
    flat = layout.named(bucket.name, f"parameter{place}_flat")
    one = scalars.constant("one", [-1])
    made = {flat: TensorType(narrow or type.dtype, (None,))}
    draft.add("Reshape", [travels, one], made, place=Owner(owner))
    return flat


def _rename(draft: Draft, cone: Cone, old: str, new: str) -> None:
    """Give a value that a cone makes another name, inside the cone."""
    for node in map(draft.own, cone.nodes):
        if old in node.outputs:
            draft.rename_output(node, old, new)
        draft.rewire(node, old, new)
