"""Emit whole and replicated buckets: updates that run as they stand, on their owner or on every rank."""

from __future__ import annotations

from gopt.analysis.updates import UpdateSubgraph
from gopt.ir.rewriter import GraphRewriter
from gopt.ir.types import TensorType
from gopt.passes.shard import emit
from gopt.passes.shard.gradient_reduction import GradientReduction
from gopt.passes.shard.parameter_gather import GatherBucket, OwnedParameter, ParameterGather
from gopt.passes.shard.plan import ReplicatedBucket, Style, WholeBucket
from gopt.passes.shard.scalar_reductions import ScalarReductions
from gopt.passes.shard.split import Emitted
from gopt.program import BucketSlice, ShardedState
from gopt.sharding.placements import Sharding


def emit_replicated(bucket: ReplicatedBucket, reduction: GradientReduction) -> None:
    """Reduce the gradients of a bucket on every rank; the updates stay as they are."""
    reduction.everywhere(bucket.name, [subgraph.gradient for subgraph in bucket.subgraphs])


def emit_whole(
    rewriter: GraphRewriter,
    bucket: WholeBucket,
    style: Style,
    scalars: ScalarReductions,
    reduction: GradientReduction,
    gather: ParameterGather,
) -> Emitted:
    """Bring whole gradients to their owners, run each update there, deliver the new parameters."""
    types = rewriter.graph.types
    out = Emitted()
    _bring(rewriter, bucket, style, scalars, reduction)
    parts = []
    for place, subgraph in enumerate(bucket.subgraphs):
        owned = gather.owned(subgraph)
        part = _place(rewriter, bucket, place, subgraph, scalars, owned)
        parts.append(part if style is Style.BROADCAST else _flat(rewriter, bucket, place, part, scalars))
        for state in subgraph.states[0 if owned else 1 :]:
            input = part.current if state is subgraph.parameter else state.tensor
            held = BucketSlice(state.tensor, 0, types[state.tensor].elements)
            out.states[state.tensor] = ShardedState(
                input, state.updated, types[state.tensor].dtype, (held,), bucket.owned(place)
            )
            out.layout.append((state.tensor,))
    cuts = None if style is Style.BROADCAST else bucket.cuts
    gather.add(GatherBucket(bucket.name, bucket.subgraphs, tuple(parts), cuts))
    if not gather.owned(bucket.subgraphs[0]):
        out.layout.insert(0, tuple(subgraph.parameter.tensor for subgraph in bucket.subgraphs))
    return out


def _bring(
    rewriter: GraphRewriter, bucket: WholeBucket, style: Style, scalars: ScalarReductions, reduction: GradientReduction
) -> None:
    """Reduce each gradient to where its update runs."""
    gradients = [subgraph.gradient for subgraph in bucket.subgraphs]
    if any(subgraph.whole_gradient for subgraph in bucket.subgraphs):
        reduction.everywhere(bucket.name, gradients)
    elif style is Style.BROADCAST:
        reduction.to_owners(bucket.name, gradients, bucket.owners)
    else:
        shard = reduction.to_shard(bucket.name, gradients, bucket.cuts)
        unrounded = reduction.unrounded.get(shard)
        for place, subgraph in enumerate(bucket.subgraphs):
            whole = emit.named(bucket.name, f"gradient{place}")
            _unpack(rewriter, whole, rewriter.graph.types[subgraph.gradient], shard, bucket.run(place), scalars)
            reduction.reduced[subgraph.gradient] = whole
            if unrounded is not None:
                type = TensorType(rewriter.graph.types[unrounded].dtype, rewriter.graph.types[subgraph.gradient].shape)
                _unpack(rewriter, f"{whole}_exact", type, unrounded, bucket.run(place), scalars)
                reduction.unrounded[whole] = f"{whole}_exact"


def _unpack(
    rewriter: GraphRewriter, whole: str, type: TensorType, shard: str, run: Sharding, scalars: ScalarReductions
) -> None:
    """One tensor of a bucket in its own shape, on its owner."""
    emit.shard_slice(rewriter, shard, run, f"{whole}_flat", type.dtype)
    shape = scalars.constant("shape" + "_".join(map(str, type.dims)), list(type.dims))
    rewriter.add("Reshape", [f"{whole}_flat", shape], {whole: type}, sharding=run)


def _flat(
    rewriter: GraphRewriter, bucket: WholeBucket, place: int, part: OwnedParameter, scalars: ScalarReductions
) -> OwnedParameter:
    """An owned parameter as its run of the bucket."""
    one = scalars.constant("one", [-1])
    names = [emit.named(bucket.name, f"{role}{place}_flat") for role in ("parameter", "updated")]
    for source, name in zip((part.current, part.updated), names):
        made = {name: emit.flat(rewriter.graph.types[source].dtype, part.elements)}
        rewriter.add("Reshape", [source, one], made, sharding=part.sharding)
    return OwnedParameter(names[0], names[1], part.sharding, part.elements)


def _place(
    rewriter: GraphRewriter,
    bucket: WholeBucket,
    place: int,
    subgraph: UpdateSubgraph,
    scalars: ScalarReductions,
    owned: bool,
) -> OwnedParameter:
    """Put the source's own nodes on the owner; returns the parameter there, before and after the update."""
    there = bucket.owned(place)
    for node in subgraph.nodes:
        rewriter.counterpart(node).sharding = there
        rewriter.annotate(
            node, f"{bucket.name}: {subgraph.parameter.tensor} is updated by its owner alone; {subgraph.why}"
        )
    for number, node in enumerate(subgraph.reductions):
        name = node.outputs[0]
        share = emit.named(bucket.name, f"share{place}_{number}")
        _rename(rewriter, subgraph, name, share)
        if rewriter.graph.types[share].dims:
            scalar = f"{share}.scalar"
            empty = scalars.constant("shape", [])
            rewriter.add(
                "Reshape",
                [share, empty],
                {scalar: TensorType(rewriter.graph.types[share].dtype, ())},
                sharding=there,
            )
            share = scalar
        scalars.share([name], share)
    type = rewriter.graph.types[subgraph.parameter.updated]
    parameter, updated = subgraph.parameter.tensor, subgraph.parameter.updated
    if owned:
        # The owner's master has a name of its own: the source's name is what every rank gathers.
        parameter = emit.named(bucket.name, f"parameter{place}")
        rewriter.graph.types[parameter] = type
        for node in map(rewriter.counterpart, subgraph.nodes):
            rewriter.rewire(node, subgraph.parameter.tensor, parameter)
    else:
        updated = emit.named(bucket.name, f"parameter{place}_out")
        _rename(rewriter, subgraph, subgraph.parameter.updated, updated)
    return OwnedParameter(parameter, updated, there, type.elements)


def _rename(rewriter: GraphRewriter, subgraph: UpdateSubgraph, old: str, new: str) -> None:
    """Give a value that a subgraph makes another name, inside the subgraph."""
    for node in map(rewriter.counterpart, subgraph.nodes):
        if old in node.outputs:
            rewriter.rename_output(node, old, new)
        rewriter.rewire(node, old, new)
